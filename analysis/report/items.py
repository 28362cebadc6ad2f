"""The types of tables and figures: every number has the trials behind it, or there is the reason for its absence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup

from fewbits.analysis.engine.results.data import Differences, NoData, NotPlanned
from fewbits.analysis.engine.statistics.estimates import LEVEL, Interval, estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fewbits.analysis.engine.results.frames import Results


@dataclass(frozen=True)
class OutOfReach:
    """The reason why no scale of ours can give a number."""

    reason: str


@dataclass(frozen=True)
class Setting:
    """The text of a cell that is not a measured number: a setting from the trials' configs, or a remark."""

    text: str
    trials: tuple[str, ...] = ()
    assumed: bool = False  # the paper does not state the setting


@dataclass(frozen=True)
class Value:
    """A measured number: the mean over seeds, with the trials that it is from."""

    mean: float
    interval: Interval | None = None  # None with one seed
    n: int = 0
    trials: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(data: Differences | NoData) -> Value | NoData:
        """Return the mean of a sample or of paired differences."""
        if isinstance(data, NoData):
            return data
        if not data.values:
            return NoData(f"{data.diverged or data.baseline_diverged} pairs diverged", data.trials)
        estimated = estimate(data.values, data.spread, data.shared)
        notes = data.notes
        if data.diverged or data.baseline_diverged:
            notes += (f"diverged: {data.diverged} of ours, {data.baseline_diverged} of the baseline",)
        if estimated is None:
            return Value(data.values[0], None, 1, data.trials, notes)
        return Value(estimated.mean, estimated.interval(LEVEL), estimated.n, data.trials, notes)

    def times(self, factor: float) -> Value:
        """Return the number and its interval in another unit, such as percent."""
        interval = self.interval and Interval(
            self.interval.low * factor, self.interval.high * factor, self.interval.level
        )
        return replace(self, mean=self.mean * factor, interval=interval)


Missing = NoData | NotPlanned | OutOfReach
Ours = Value | Setting | Missing


def why_missing(ours: Missing) -> str:
    """Return the text that says why there is no number."""
    if isinstance(ours, NotPlanned):
        return ours.reason
    return f"{'out of reach' if isinstance(ours, OutOfReach) else 'no data'}: {ours.reason}"


@dataclass(frozen=True)
class TableCell:
    """A cell of a table, with the paper's number and ours."""

    ours: Ours
    paper: float | str | None = None  # None if the paper has no number, or its text as we have it lacks it
    source: str = ""  # the source of the paper's number
    comparable: bool = True  # false for losses, which depend on model and data; then no difference is shown

    @property
    def difference(self) -> float | None:
        """Our number minus the paper's; None if they cannot be compared."""
        if isinstance(self.ours, Value) and isinstance(self.paper, float) and self.comparable:
            return self.ours.mean - self.paper
        return None

    @property
    def trials(self) -> tuple[str, ...]:
        return () if isinstance(self.ours, NotPlanned | OutOfReach) else self.ours.trials


@dataclass(frozen=True)
class TableRow:
    """A row of a table, for one metric."""

    title: str
    cells: tuple[TableCell, ...]
    unit: str = ""


@dataclass(frozen=True)
class TableResult:
    """A table with rows and columns as in the paper."""

    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()
    control: Markup | None = None  # HTML above the table that changes its cells; the table is complete without it

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"row {row.title}: {len(row.cells)} cells in {len(self.columns)} columns")

    @property
    def trials(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(t for row in self.rows for cell in row.cells for t in cell.trials))

    def frame(self) -> pd.DataFrame:
        """Return the table in long form: a row for each metric and column of the table.

        `paper`, `ours`, `difference`, `low` and `high` are numbers or NaN; `note` has a cell's text: a setting, the
        reason for a missing number, or what the paper prints instead of a number.
        """
        return pd.DataFrame(
            [
                _record(row, column, cell)
                for row in self.rows
                for column, cell in zip(self.columns, row.cells, strict=True)
            ]
        )


@dataclass(frozen=True)
class FigureResult:
    """A figure as the function that draws it."""

    draw: Callable[[], Figure]
    trials: tuple[str, ...] = ()  # empty for a schematic
    notes: tuple[str, ...] = ()


Table = TableResult | NoData | NotPlanned
Picture = FigureResult | NoData | NotPlanned
MakeTable = Callable[["Results"], Table]
MakeFigure = Callable[["Results"], Picture]


def _record(row: TableRow, column: str, cell: TableCell) -> dict[str, Any]:
    value = cell.ours if isinstance(cell.ours, Value) else None
    interval = value.interval if value else None
    return {
        "metric": row.title,
        "unit": row.unit,
        "column": column,
        "paper": cell.paper if isinstance(cell.paper, float) else math.nan,
        "ours": value.mean if value else math.nan,
        "difference": math.nan if cell.difference is None else cell.difference,
        "low": interval.low if interval else math.nan,
        "high": interval.high if interval else math.nan,
        "seeds": value.n if value else 0,
        "note": "; ".join(filter(None, (_text(cell.ours), cell.paper if isinstance(cell.paper, str) else ""))),
    }


def _text(ours: Ours) -> str:
    if isinstance(ours, Setting):
        return f"{ours.text} (assumed)" if ours.assumed else ours.text
    return "" if isinstance(ours, Value) else why_missing(ours)
