"""Show the progress of long work on stderr: a bar for each running item on a terminal, plain log lines elsewhere.

The package rich draws the bars below everything else that is printed. It is imported only if stderr is a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from fewbits.common.redaction import redacted

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

QUIET = 60.0  # seconds after which a log line is printed although the counts have not changed
BAR = 12  # the width of a bar, in characters
WIDE, MEDIUM = 100, 76  # the least widths of a terminal, in characters, at which bars and speeds are shown


@dataclass(frozen=True)
class Bar:
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

        counts: the part of the summary whose changes matter. A log line is printed only if `counts` differs from its
        value at the last log line, or if QUIET seconds have passed since.
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

    width: the terminal's width in characters. If it is below WIDE, the rows have no drawn bar, only the name and
    numbers; if it is below MEDIUM, they also have no speed.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    columns: list[list[Any]] = [
        [f"{bar.step}/{bar.steps}" for bar in bars],
        ["" if bar.loss is None else f"loss {bar.loss:.4f}" for bar in bars],
        ["" if bar.seconds_left is None else f"{clock(bar.seconds_left)} left" for bar in bars],
    ]
    if width >= MEDIUM:
        columns.insert(2, [f"{bar.tokens_per_second:,.0f} tokens/s" if bar.tokens_per_second else "" for bar in bars])
    taken = sum(2 + max(map(len, column), default=0) for column in columns)
    if width >= WIDE:
        columns.insert(0, [ProgressBar(bar.steps, bar.step, width=BAR) for bar in bars])
        taken += 2 + BAR
    columns = [column for column in columns if any(column)]
    rows = Table.grid(padding=(0, 2, 0, 0))
    for cells in zip([_shortened(bar.name, width - taken) for bar in bars], *columns, strict=True):
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


def clock(seconds: float) -> str:
    """Return a duration in seconds as text: `M:SS`, `H:MM:SS` or, from one day on, `D days H h`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} {'day' if days == 1 else 'days'} {hours} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
