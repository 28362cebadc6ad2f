"""What tables and figures return: typed, with the trials behind every number. No data is a value, not an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from fewbits.analysis.engine.data import Differences, NoData
from fewbits.analysis.engine.statistics import Interval, summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class NotRun:
    """In place of what belongs to arms that this scale leaves out."""

    scale: str

    def __str__(self) -> str:
        return f"not run at this scale ({self.scale})"


@dataclass(frozen=True)
class OutOfReach:
    """In place of what no scale of ours can give."""

    reason: str

    def __str__(self) -> str:
        return f"out of reach: {self.reason}"


@dataclass(frozen=True)
class Setting:
    """Not measured but chosen: a word or a number of the trials' own configs."""

    text: str
    trials: tuple[str, ...]
    assumed: bool = False  # the paper does not say it

    def __str__(self) -> str:
        return f"{self.text} (assumed)" if self.assumed else self.text


@dataclass(frozen=True)
class Value:
    """A number of ours: the mean over seeds, with what it comes from."""

    mean: float
    interval: Interval | None  # None with one seed
    n: int
    trials: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(found: Differences | NoData) -> Value | NoData:
        """Of a sample or of paired differences."""
        if isinstance(found, NoData):
            return found
        if not found.values:
            return NoData(f"{found.diverged or found.baseline_diverged} pairs diverged", found.trials)
        s = summary(found.values, spread=found.spread)
        notes = found.notes
        if found.diverged or found.baseline_diverged:
            notes += (f"diverged: {found.diverged} of ours, {found.baseline_diverged} of the baseline",)
        return Value(s.mean, s.interval, s.n, found.trials, notes)

    def times(self, factor: float) -> Value:
        """In another unit: percent, say."""
        interval = self.interval and Interval(
            self.interval.low * factor, self.interval.high * factor, self.interval.level
        )
        return replace(self, mean=self.mean * factor, interval=interval)


Ours = Value | Setting | NoData | NotRun | OutOfReach


@dataclass(frozen=True)
class TableCell:
    ours: Ours
    paper: float | str | None = None  # None: the paper has none, or it is lost
    source: str = ""  # of the paper's number
    comparable: bool = True  # losses of other models on other data are not: their difference would mean nothing

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        if isinstance(self.ours, Value) and isinstance(self.paper, float) and self.comparable:
            return self.ours.mean - self.paper
        return None

    @property
    def trials(self) -> tuple[str, ...]:
        return () if isinstance(self.ours, NotRun | OutOfReach) else self.ours.trials


@dataclass(frozen=True)
class TableRow:
    title: str
    cells: tuple[TableCell, ...]
    unit: str = ""


@dataclass(frozen=True)
class TableResult:
    """Rows and columns as in the paper; of each cell paper, ours, difference."""

    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.cells) != len(self.columns):
                raise ValueError(f"row {row.title}: {len(row.cells)} cells in {len(self.columns)} columns")

    @property
    def trials(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(t for row in self.rows for cell in row.cells for t in cell.trials))

    def frame(self) -> pd.DataFrame:
        """For CSV and LaTeX: of each column paper, ours and difference, and the interval of ours with its seeds."""
        return pd.DataFrame([_row(row, self.columns) for row in self.rows])


@dataclass(frozen=True)
class FigureResult:
    """A picture that is drawn when it is asked for."""

    draw: Callable[[], Figure]
    trials: tuple[str, ...]  # none of a schematic
    notes: tuple[str, ...] = ()


Table = TableResult | NoData | NotRun
Picture = FigureResult | NoData | NotRun


def _row(row: TableRow, columns: tuple[str, ...]) -> Mapping[str, Any]:
    found: dict[str, Any] = {"metric": row.title, "unit": row.unit}
    for column, cell in zip(columns, row.cells, strict=True):
        found[f"{column}: paper"] = cell.paper
        found[f"{column}: difference"] = cell.difference
        if isinstance(cell.ours, Value):
            interval = cell.ours.interval
            found[f"{column}: ours"] = cell.ours.mean
            found[f"{column}: low"] = interval.low if interval else None
            found[f"{column}: high"] = interval.high if interval else None
            found[f"{column}: seeds"] = cell.ours.n
        else:
            words = f"no data: {cell.ours.reason}" if isinstance(cell.ours, NoData) else str(cell.ours)
            found |= {f"{column}: {name}": None for name in ("low", "high")}
            found |= {f"{column}: ours": words, f"{column}: seeds": 0}
    order = ("paper", "ours", "difference", "low", "high", "seeds")
    return {k: found[k] for k in ("metric", "unit", *(f"{c}: {name}" for c in columns for name in order))}
