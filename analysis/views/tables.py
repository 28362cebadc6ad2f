"""Render a table as HTML; a row has up to three lines: the paper's numbers, ours, and the differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.report.items import (
    Missing,
    OutOfReach,
    Setting,
    TableCell,
    TableResult,
    TableRow,
    Value,
    why_missing,
)
from fewbits.analysis.views.html import render
from fewbits.analysis.views.numbers import decimals, number, sentence

LINES = ("paper", "ours", "difference")  # the lines of a row, in order
# The maximal number of decimals in the papers. Numbers that are computed from the papers' numbers get no more decimals.
PRINTED = 4


@dataclass(frozen=True)
class CellView:
    """One cell of a displayed table."""

    text: str
    small: str = ""  # text in small letters: the half width of the interval, or a remark
    title: str | None = None  # the tooltip
    kind: str = "number"  # the CSS class
    span: int = 1  # the number of columns that the cell covers


@dataclass(frozen=True)
class LineView:
    """One of the lines in which a row is displayed, such as the line of our numbers."""

    what: str  # one of LINES
    cells: tuple[CellView, ...]


def table_html(result: TableResult, notes: Sequence[str] | None = None) -> Markup:
    """Return the table as HTML, with these notes or, without any, with all of its own.

    The rows are left out if all our numbers are missing because the sweeps of the report's scale do not have the arms
    that give them; then the reason is shown.
    """
    numbers = [cell.ours for row in result.rows for cell in row.cells]
    missing = next((number for number in numbers if isinstance(number, NotPlanned)), None)
    folded = all(isinstance(number, NotPlanned | OutOfReach) or number == Setting("") for number in numbers)
    return render(
        "table",
        groups=list(_groups(result.columns)),
        heads=_heads(result.columns),
        rows=[(row, _lines(row)) for row in result.rows],
        notes=(*(result.notes if notes is None else notes), *_unreached(result)),
        folded=sentence(why_missing(missing)) if missing and folded else "",
    )


def _unreached(result: TableResult) -> tuple[str, ...]:
    """Return a note for each distinct reason why numbers of the table are out of reach (no scale gives them)."""
    numbers = (cell.ours for row in result.rows for cell in row.cells)
    return tuple(dict.fromkeys(f"Out of reach: {ours.reason}" for ours in numbers if isinstance(ours, OutOfReach)))


def _split(columns: tuple[str, ...]) -> list[tuple[str, str, str]] | None:
    """Split each column's title at the first ": " into (group, ": ", name); return None if there are no groups.

    There are groups if all titles have the form `GROUP: NAME` and at least two columns have the same group.
    """
    parts = [column.partition(": ") for column in columns]
    grouped = all(name for _, _, name in parts) and len({group for group, _, _ in parts}) < len(parts)
    return parts if grouped else None


def _groups(columns: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for group, several in groupby(_split(columns) or (), key=lambda part: part[0]):
        yield group, len(list(several))


def _heads(columns: tuple[str, ...]) -> list[str]:
    parts = _split(columns)
    return [name for _, _, name in parts] if parts else list(columns)


def _lines(row: TableRow) -> list[LineView]:
    """Return the lines of a row: always the line `ours`; the lines `paper` and `difference` only if they have text."""
    lines = []
    for line in LINES:
        if line == "ours" and (merged := _same(row)) is not None:
            lines.append(LineView(line, (merged,)))
        elif line == "ours" or any(_text(line, row, cell) for cell in row.cells):
            lines.append(LineView(line, tuple(_cell(line, row, cell) for cell in row.cells)))
    return lines


def _same(row: TableRow) -> CellView | None:
    """Return a cell as wide as the row if all our numbers in the row are missing for the same reason; else None."""
    missing = [cell.ours for cell in row.cells if isinstance(cell.ours, Missing)]
    if len(missing) < len(row.cells) or len({why_missing(ours) for ours in missing}) != 1:
        return None
    text = "out of reach" if isinstance(missing[0], OutOfReach) else why_missing(missing[0])
    return CellView(text, kind="missing", span=len(row.cells))


def _cell(line: str, row: TableRow, cell: TableCell) -> CellView:
    text, ours = _text(line, row, cell), cell.ours
    if line != "ours":
        return CellView(text, title=cell.source if line == "paper" and text else None)
    if isinstance(ours, Setting):
        return CellView(text, " assumed" if ours.assumed else "", kind="setting")
    if not isinstance(ours, Value):
        return CellView(text, title=why_missing(ours), kind="missing")
    return CellView(text, _half(ours), _title(ours))


def _text(line: str, row: TableRow, cell: TableCell) -> str:
    ours, places = cell.ours, 0 if _counted(row) else PRINTED
    if isinstance(ours, Value) and ours.interval:
        places = decimals(ours.mean, (ours.interval.high - ours.interval.low) / 2)
    if line == "paper":
        if cell.paper is None or isinstance(cell.paper, str):
            return cell.paper or ""
        return number(cell.paper, _printed(row))
    if line == "difference":
        return "" if cell.difference is None else number(cell.difference, places, sign=True)
    if isinstance(ours, Setting):
        return ours.text
    return number(ours.mean, places) if isinstance(ours, Value) else _briefly(ours)


def _briefly(ours: Missing) -> str:
    """Return the reason for a missing number in two or three words, for a cell."""
    return {NoData: "no data", NotPlanned: "not run", OutOfReach: "out of reach"}[type(ours)]


def _counted(row: TableRow) -> bool:
    """Tell whether all our numbers in the row are integers without intervals, such as counts."""
    values = [cell.ours for cell in row.cells if isinstance(cell.ours, Value)]
    return all(value.interval is None and float(value.mean).is_integer() for value in values)


def _printed(row: TableRow) -> int:
    """Return the number of decimals that show all of the paper's numbers in the row exactly, but at most PRINTED."""
    texts = (f"{cell.paper:.10g}" for cell in row.cells if isinstance(cell.paper, float))
    return min(PRINTED, max(len(text.partition(".")[2]) if "e" not in text else 0 for text in texts))


def _half(ours: Value) -> str:
    if ours.interval is None:
        return ""
    half = (ours.interval.high - ours.interval.low) / 2
    return f" ± {number(half, decimals(ours.mean, half))}"


def _title(ours: Value) -> str:
    """Return the tooltip of a number: the number of seeds, and the notes."""
    seeds = f"mean of {ours.n} seeds" if ours.n > 1 else "one seed, which gives no interval"
    if not ours.trials:  # the number was timed or computed without training
        seeds = f"timed {ours.n} times" if ours.n else "computed"
    level = f", ± {ours.interval.level:.0%} interval" if ours.interval else ""
    return "; ".join(filter(None, [f"{seeds}{level}", *ours.notes]))
