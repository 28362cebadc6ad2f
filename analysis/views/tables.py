"""Render a table as HTML; a row has up to three lines: the paper's numbers, ours, and the differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.report.items import Missing, OutOfReach, Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.items import why_missing as why
from fewbits.analysis.views.html import decimals, number, render, sentence

# The maximal number of decimals in the papers. Numbers that are computed from the papers' numbers get no more decimals.
PRINTED = 4
BRIEF: dict[type[Missing], str] = {NoData: "no data", NotPlanned: "not run", OutOfReach: "out of reach"}


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

    what: str
    cells: tuple[CellView, ...]


def table_html(result: TableResult, notes: Sequence[str] | None = None) -> Markup:
    """Return the table as HTML, with these notes or, without any, with all of its own.

    The rows are left out if all our numbers are missing because the sweeps of the report's scale do not have the arms
    that give them; then the reason is shown.
    """
    ours = [cell.ours for row in result.rows for cell in row.cells]
    missing = next((one for one in ours if isinstance(one, NotPlanned)), None)
    folded = all(isinstance(one, NotPlanned | OutOfReach) or one == Setting("") for one in ours)
    unreached = dict.fromkeys(f"Out of reach: {one.reason}" for one in ours if isinstance(one, OutOfReach))
    # There are groups if all titles have the form `GROUP: NAME` and at least two columns have the same group.
    parts = [column.partition(": ") for column in result.columns]
    grouped = all(name for _, _, name in parts) and len({group for group, _, _ in parts}) < len(parts)
    groups = groupby(parts if grouped else (), key=lambda part: part[0])
    return render(
        "table",
        groups=[(group, len(list(several))) for group, several in groups],
        heads=[name for _, _, name in parts] if grouped else result.columns,
        rows=[(row, _lines(row)) for row in result.rows],
        notes=(*(result.notes if notes is None else notes), *unreached),
        folded=sentence(why(missing)) if missing and folded else "",
    )


def _lines(row: TableRow) -> list[LineView]:
    """Return the lines of a row: always the line `ours`; the lines `paper` and `difference` only if they have text."""
    printed = [f"{cell.paper:.10g}" for cell in row.cells if isinstance(cell.paper, float)]
    # The decimals that show all of the paper's numbers in the row exactly, but at most PRINTED.
    exact = min(PRINTED, max((len(text.partition(".")[2]) for text in printed if "e" not in text), default=0))
    values = [cell.ours for cell in row.cells if isinstance(cell.ours, Value)]
    counted = all(value.interval is None and float(value.mean).is_integer() for value in values)
    places = 0 if counted else PRINTED
    lines = {
        "paper": tuple(_paper(cell, exact) for cell in row.cells),
        "ours": _merged(row) or tuple(_ours(cell, places) for cell in row.cells),
        "difference": tuple(_difference(cell, places) for cell in row.cells),
    }
    return [LineView(name, cells) for name, cells in lines.items() if name == "ours" or any(one.text for one in cells)]


def _merged(row: TableRow) -> tuple[CellView, ...]:
    """Return a cell as wide as the row if all our numbers in the row are missing for the same reason; else ()."""
    missing = [cell.ours for cell in row.cells if isinstance(cell.ours, Missing)]
    if len(missing) < len(row.cells) or len({why(ours) for ours in missing}) != 1:
        return ()
    text = BRIEF[OutOfReach] if isinstance(missing[0], OutOfReach) else why(missing[0])
    return (CellView(text, kind="missing", span=len(row.cells)),)


def _paper(cell: TableCell, places: int) -> CellView:
    text = number(cell.paper, places) if isinstance(cell.paper, float) else cell.paper or ""
    return CellView(text, title=cell.source if text else None)


def _ours(cell: TableCell, places: int) -> CellView:
    ours = cell.ours
    if isinstance(ours, Setting):
        return CellView(ours.text, " assumed" if ours.assumed else "", kind="setting")
    if not isinstance(ours, Value):
        return CellView(BRIEF[type(ours)], title=why(ours), kind="missing")
    seeds = f"mean of {ours.n} seeds" if ours.n > 1 else "one seed, which gives no interval"
    if not ours.trials:  # the number was timed or computed without training
        seeds = f"timed {ours.n} times" if ours.n else "computed"
    level = f", ± {ours.interval.level:.0%} interval" if ours.interval else ""
    title = "; ".join(filter(None, [f"{seeds}{level}", *ours.notes]))
    half = f" ± {number(ours.interval.half, _places(ours, places))}" if ours.interval else ""
    return CellView(number(ours.mean, _places(ours, places)), half, title)


def _difference(cell: TableCell, places: int) -> CellView:
    if cell.difference is None or not isinstance(cell.ours, Value):
        return CellView("")
    return CellView(number(cell.difference, _places(cell.ours, places), sign=True))


def _places(ours: Value, places: int) -> int:
    return decimals(ours.mean, ours.interval.half) if ours.interval else places
