"""The types of tables and figures in reports. A number has the ids of its trials; a missing number has a reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from fewbits.analysis.engine.results.data import Differences, NoData, NotPlanned
from fewbits.analysis.engine.statistics import LEVEL, Interval, estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fewbits.analysis.engine.results.frames import Results


@dataclass(frozen=True)
class OutOfReach:
    """The reason why no scale of the study can give a number."""

    reason: str


@dataclass(frozen=True)
class Setting:
    """The text of a table cell that has no measured number: a setting from the trials' configs, or a remark."""

    text: str
    trials: tuple[str, ...] = ()  # ids
    assumed: bool = False  # true if the paper does not state the setting, so we chose it

    def __str__(self) -> str:
        return f"{self.text} (assumed)" if self.assumed else self.text


@dataclass(frozen=True)
class Value:
    """A measured number: the mean over seeds, with the ids of the trials that measured it."""

    mean: float
    interval: Interval | None = None  # None with one seed
    n: int = 0  # the number of seeds
    trials: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(data: Differences | NoData) -> Value | NoData:
        """Return the mean over seeds; NoData if a trial of each pair diverged."""
        if isinstance(data, NoData):
            return data
        if not data.values:
            return NoData(f"{data.diverged or data.baseline_diverged} pairs diverged", data.trials)
        estimated = estimate(data.values, data.shared)
        notes = data.notes
        if data.diverged or data.baseline_diverged:
            notes += (f"diverged: {data.diverged} of ours, {data.baseline_diverged} of the baseline",)
        if estimated is None:
            return Value(data.values[0], None, 1, data.trials, notes)
        return Value(estimated.mean, estimated.interval(LEVEL), estimated.n, data.trials, notes)

    def times(self, factor: float) -> Value:
        """Return the value with its mean and interval multiplied by the factor, for example 100 for percent."""
        of = self.interval
        interval = of and replace(of, low=of.low * factor, high=of.high * factor)
        return replace(self, mean=self.mean * factor, interval=interval)


Missing = NoData | NotPlanned | OutOfReach
Ours = Value | Setting | Missing


def why_missing(ours: Missing) -> str:
    """Return the text that a cell shows instead of a missing number: the reason, and which kind of reason it is."""
    if isinstance(ours, NotPlanned):
        return ours.reason
    return f"{'out of reach' if isinstance(ours, OutOfReach) else 'no data'}: {ours.reason}"


@dataclass(frozen=True)
class TableCell:
    """A cell of a table, with the paper's number and ours."""

    ours: Ours
    paper: float | str | None = None  # the paper's number or text; None if the paper, or our copy of it, has none
    source: str = ""  # where the paper's number comes from
    comparable: bool = True  # if false, no difference is shown, as for losses, which depend on model and data

    @property
    def difference(self) -> float | None:
        """Our number minus the paper's; None if one of them is missing, or if they are not comparable."""
        if isinstance(self.ours, Value) and isinstance(self.paper, float) and self.comparable:
            return self.ours.mean - self.paper
        return None

    @property
    def trials(self) -> tuple[str, ...]:
        return () if isinstance(self.ours, NotPlanned | OutOfReach) else self.ours.trials


@dataclass(frozen=True)
class TableRow:
    """A row of a table: the numbers of one metric."""

    title: str
    cells: tuple[TableCell, ...]  # one for each column of the table
    unit: str = ""


@dataclass(frozen=True)
class TableResult:
    """A table; if it is one of the paper's, it has the paper's rows and columns."""

    columns: tuple[str, ...]  # titles
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def trials(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(t for row in self.rows for cell in row.cells for t in cell.trials))

    def frame(self) -> pd.DataFrame:
        """Return the table in long form: a row for each cell, named by `metric`, `unit` and `column`.

        `paper`, `ours` and `difference` are numbers or NaN, as are `low` and `high`, the ends of the confidence
        interval of `ours`; `seeds` is the number of seeds. `note` has the cell's text: a setting, the reason for a
        missing number, or what the paper prints instead of a number.
        """
        cells = [pair for row in self.rows for pair in zip(self.columns, row.cells, strict=True)]
        rows = [row for row in self.rows for _ in row.cells]
        return pd.DataFrame([_record(row, *pair) for row, pair in zip(rows, cells, strict=True)])


@dataclass(frozen=True)
class FigureResult:
    """A figure that is not drawn yet: the function that draws it, the ids of its trials, and the notes below it."""

    draw: Callable[[], Figure]  # draws in the active theme (figures/theme.py)
    trials: tuple[str, ...] = ()  # ids; empty for a schematic, which no trial computes
    notes: tuple[str, ...] = ()


Table = TableResult | NoData | NotPlanned
Picture = FigureResult | NoData | NotPlanned
MakeTable = Callable[["Results"], Table]
MakeFigure = Callable[["Results"], Picture]


def _record(row: TableRow, column: str, cell: TableCell) -> dict[str, Any]:
    ours = cell.ours
    value = ours if isinstance(ours, Value) else None
    interval = value.interval if value else None
    text = str(ours) if isinstance(ours, Setting) else "" if isinstance(ours, Value) else why_missing(ours)
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
        "note": "; ".join(filter(None, (text, cell.paper if isinstance(cell.paper, str) else ""))),
    }
