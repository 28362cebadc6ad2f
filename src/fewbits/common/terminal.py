"""Print on stderr what happens (notices, a status line, bars of progress), and tables on stdout.

All commands import this module, so it imports large modules, and rich, which draws the bars, only when it needs them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from fewbits.common.wording import clock, redacted

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

GAP = 2  # spaces between the columns of a table
FOLDED = 24  # the least width of a column whose text is wrapped, in characters
QUIET = 60.0  # seconds after which a log line of progress is printed although the counts have not changed
BAR = 12  # the width of a bar of progress, in characters
WIDE = 100  # the least width of a terminal, in characters, at which bars and speeds are shown


def notice(text: object) -> None:
    """Print the text as one line on stderr, after `fewbits: `, with credentials replaced by `***`."""
    clear()
    print(f"fewbits: {redacted(' '.join(str(text).split()))}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Replace the status line by this text, cut to the terminal's width; do nothing if stderr is no terminal."""
    if sys.stderr.isatty():
        width = _columns() - 1  # a text of several lines could not be erased
        print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def clear() -> None:
    """Erase the status line."""
    show("")


def print_json(value: object) -> None:
    """Print a value as indented JSON; infinities and NaN, which JSON does not have, become null."""
    import json

    print(json.dumps(_finite(value), indent=2, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = (), file: TextIO | None = None
) -> None:
    """Print the names of the columns, unless all are empty, and then the rows, to stdout or `file`.

    right: names of the columns to align right, such as numbers. On a terminal, the names are bold, and the text of a
    last column that is not aligned right is wrapped. In a pipe or file, each row is one line of plain text.
    """
    import textwrap

    file = file or sys.stdout
    table = [columns, *rows] if any(columns) else list(rows)
    widths = [max(map(len, cells)) for cells in zip(columns, *table, strict=True)]
    before, last = sum(width + GAP for width in widths[:-1]), widths[-1]
    if file.isatty() and columns[-1] not in right:
        last = min(last, max(FOLDED, _columns() - before))
    for row in table:
        cells = zip(columns, row, widths, strict=True)
        line = (" " * GAP).join(
            text.rjust(width) if name in right else text.ljust(width) for name, text, width in cells
        )
        if len(row[-1]) > last:
            folded = textwrap.wrap(row[-1], last, break_on_hyphens=False)
            line = line[:before] + f"\n{' ' * before}".join(folded)
        line = line.rstrip()
        print(f"\033[1m{line}\033[0m" if file.isatty() and row is columns else line, file=file)


class Bar(NamedTuple):
    """The progress of one running item, such as a trial. Values that are None are not shown."""

    name: str
    step: int  # steps done
    steps: int  # steps in total
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None


class Progress:
    """The progress display of one piece of work, such as a sweep."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live: Live | None = None
        self._logged: tuple[object, float] = (None, 0.0)  # (`counts` of the last log line, when it was printed)

    def update(self, summary: str, bars: Sequence[Bar], counts: object) -> None:
        """Draw the summary and the bars on a terminal; elsewhere, print the summary as a log line.

        counts: a log line is printed only if it differs from its value at the last line, or after QUIET seconds.
        """
        if self._stream.isatty():
            self._live = self._live or _live(self._stream)
            self._live.update(_drawn(summary, bars, self._live.console.width), refresh=True)
        elif self._logged[0] != counts or time.monotonic() - self._logged[1] > QUIET:
            self._logged = counts, time.monotonic()
            print(summary, file=self._stream, flush=True)

    def print_line(self, text: str) -> None:
        """Print a permanent line, on a terminal above the bars."""
        if self._live is not None:
            self._live.console.print(text, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def warn(self, message: Warning | str, *_: object) -> None:
        """Print a warning as one line. Its signature is that of `warnings.showwarning`, which it can replace."""
        self.print_line(f"fewbits: {redacted(' '.join(str(message).split()))}")

    def close(self) -> None:
        """Erase the bars. The next update draws them again."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _live(stream: TextIO) -> Live:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream, markup=False, highlight=False, emoji=False)
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
    live.start()
    return live


def _drawn(summary: str, bars: Sequence[Bar], width: int) -> Table:
    """Return the display as a table: the summary, then a row for each item of `bars`.

    width: the terminal's width in characters. If it is below WIDE, the rows have no drawn bar and no speed.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    wide = width >= WIDE
    columns: list[list[Any]] = [
        [f"{bar.step}/{bar.steps}" for bar in bars],
        ["" if bar.loss is None else f"loss {bar.loss:.4f}" for bar in bars],
        [f"{bar.tokens_per_second:,.0f} tokens/s" if wide and bar.tokens_per_second else "" for bar in bars],
        ["" if bar.seconds_left is None else f"{clock(bar.seconds_left)} left" for bar in bars],
    ]
    columns = [column for column in columns if any(column)]
    left = width - sum(2 + max(map(len, column)) for column in columns) - (2 + BAR) * wide
    drawn = [[ProgressBar(bar.steps, bar.step, width=BAR) for bar in bars]] if wide else []
    rows = Table.grid(padding=(0, 2, 0, 0))
    for cells in zip([_shortened(bar.name, left) for bar in bars], *drawn, *columns, strict=True):
        rows.add_row(*cells)
    for column in rows.columns[1:]:
        column.justify, column.no_wrap = "right", True
    whole = Table.grid()
    whole.add_row(summary)
    whole.add_row(rows)
    return whole


def _shortened(name: str, width: int) -> str:
    """Return the name; if it is longer than `width`, `…` replaces its middle, since trials' names differ at the end."""
    width = max(width, 16)
    return name if len(name) <= width else f"{name[: width - 13]}…{name[-12:]}"
