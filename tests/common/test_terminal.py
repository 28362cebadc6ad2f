"""Test `print_table`: plain lines in pipes and files; bold names and wrapped text only on a terminal."""

import io

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


def test_a_file_gets_every_row_as_one_line_of_the_text_itself() -> None:
    odd = "[bold]x[/bold] :smile: 60–120 × 'q' 3.14"
    assert lines(("a", "b"), (LONG, odd), (odd, LONG))[1:] == [f"{LONG}  {odd}", f"{odd:{len(LONG)}}  {LONG}"]


def test_a_terminal_folds_the_last_column_at_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    header, *rows = on_terminal(monkeypatch, 60, ("a", "1", LONG))
    assert "\x1b[1m" in header
    assert len(rows) > 3
    assert max(map(len, rows)) <= 60
    assert " ".join(" ".join(rows).split()) == f"a 1 {LONG}"
