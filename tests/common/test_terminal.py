"""Test `print_table`: plain lines in pipes and files; bold names and wrapped text only on a terminal."""

import io
import subprocess
import sys

import pytest

from fewbits.common.terminal import print_table

LONG = "word " * 40 + "end"


def lines(columns: tuple[str, ...], *rows: tuple[str, ...], right: tuple[str, ...] = ()) -> list[str]:
    file = io.StringIO()
    print_table(columns, rows, right=right, file=file)
    return file.getvalue().splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, row: tuple[str, str, str], right: tuple[str, ...] = ()
) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    print_table(("name", "n", "description"), [row], right=right, file=file)
    return file.getvalue().splitlines()


def test_columns_are_aligned_and_lines_have_no_trailing_space() -> None:
    assert lines(("name", "n", "about"), ("a", "1,234", "x"), ("long name", "5", ""), right=("n",)) == [
        "name           n  about",
        "a          1,234  x",
        "long name      5",
    ]


def test_without_names_there_is_no_header() -> None:
    assert lines(("", ""), ("a", "b"), ("ccc", "d")) == ["a    b", "ccc  d"]


def test_a_file_gets_every_row_as_one_line_of_the_text_itself() -> None:
    odd = "[bold]x[/bold] :smile: 60–120 × 'q' 3.14"
    assert lines(("a", "b"), (LONG, odd), (odd, LONG))[1:] == [f"{LONG}  {odd}", f"{odd:{len(LONG)}}  {LONG}"]


def test_forced_colours_do_not_reach_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert lines(("a", "b"), ("1", "2")) == ["a  b", "1  2"]


def test_a_terminal_folds_the_last_column_at_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    header, *rows = on_terminal(monkeypatch, 60, ("a", "1", LONG))
    assert "\x1b[1m" in header
    assert len(rows) > 3
    assert max(map(len, rows)) <= 60
    assert " ".join(" ".join(rows).split()) == f"a 1 {LONG}"


def test_a_narrow_terminal_shows_every_character(monkeypatch: pytest.MonkeyPatch) -> None:
    _, *rows = on_terminal(monkeypatch, 10, ("a rather long name", "1,234", LONG), right=("n",))
    assert rows[0].startswith("a rather long name  1,234  word ")
    assert "".join(rows).split()[-1] == "end"


def test_numbers_in_the_last_column_are_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, row = on_terminal(monkeypatch, 10, ("a", "b", "1 000 000 000 000"), right=("description",))
    assert row == "a     b  1 000 000 000 000"


def test_rich_is_imported_only_when_a_table_is_printed() -> None:
    probe = "import sys, fewbits.cli, fewbits.common.terminal; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
