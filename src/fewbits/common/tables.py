"""Print tables of text with aligned columns and no ruled lines, for terminals, pipes and files."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TextIO

GAP = 2  # spaces between columns
FOLDED = 24  # the least width of a column whose text is wrapped, in characters


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = (), file: TextIO | None = None
) -> None:
    """Print a row with the names of the columns, and then the rows, to stdout or `file`.

    columns: the names; if all are empty, no such row is printed. right: names of the columns to align right, such as
    numbers.

    On a terminal, the names are bold. If the table is wider than the terminal, the text of the last column is wrapped,
    unless this column is aligned right. In a pipe or file, each row is one line of plain text of any length.
    """
    # Imported here, because rich takes longer to import than most commands need to start.
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    file = file or sys.stdout
    console = Console(file=file, force_terminal=file.isatty(), markup=False, emoji=False, highlight=False)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, show_header=any(columns), header_style="bold")
    folds = console.is_terminal and columns[-1] not in right
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    table.columns[-1].no_wrap = not folds
    for row in rows:
        table.add_row(*row)

    width = Measurement.get(console, console.options.update(width=1 << 20), table).maximum
    if folds:
        last = max(len(str(cell)) for cell in (columns[-1], *table.columns[-1].cells))
        width = max(min(width, console.width), width - max(0, last - FOLDED))
    console.width = width
    with console.capture() as captured:
        console.print(table)
    file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
