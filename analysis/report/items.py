"""Typed results of tables and figures, with the trials behind every number or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from fewbits.analysis.engine.data import Differences, NoData, NotPlanned
from fewbits.analysis.engine.statistics import LEVEL, Interval, estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fewbits.analysis.engine.frames import Results


@dataclass(frozen=True)
class OutOfReach:
    """The reason why no scale of ours can give a number."""

    reason: str


@dataclass(frozen=True)
class Setting:
    """Not measured but chosen: a word or a number of the trials' own configs."""

    text: str
    trials: tuple[str, ...] = ()
    assumed: bool = False  # the paper does not say it


@dataclass(frozen=True)
class Value:
    """A number of ours: the mean over seeds, with what it comes from."""

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
        found = estimate(data.values, data.spread, data.shared)
        notes = data.notes
        if data.diverged or data.baseline_diverged:
            notes += (f"diverged: {data.diverged} of ours, {data.baseline_diverged} of the baseline",)
        if found is None:
            return Value(data.values[0], None, 1, data.trials, notes)
        return Value(found.mean, found.interval(LEVEL), found.n, data.trials, notes)

    def times(self, factor: float) -> Value:
        """Return the number in another unit, for example in percent."""
        interval = self.interval and Interval(
            self.interval.low * factor, self.interval.high * factor, self.interval.level
        )
        return replace(self, mean=self.mean * factor, interval=interval)


Missing = NoData | NotPlanned | OutOfReach
Ours = Value | Setting | Missing


def why_missing(ours: Missing) -> str:
    """Return in words why there is no number."""
    if isinstance(ours, NotPlanned):
        return ours.reason
    return f"{'out of reach' if isinstance(ours, OutOfReach) else 'no data'}: {ours.reason}"


@dataclass(frozen=True)
class TableCell:
    """The paper's number and ours."""

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
        return () if isinstance(self.ours, NotPlanned | OutOfReach) else self.ours.trials


@dataclass(frozen=True)
class TableRow:
    title: str
    cells: tuple[TableCell, ...]
    unit: str = ""


@dataclass(frozen=True)
class TableResult:
    """Rows and columns as in the paper; each cell has the paper's number, ours and the difference."""

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
        """Return a row per metric; per column the paper's number, ours, difference, interval and seeds."""
        return pd.DataFrame([_record(row, self.columns) for row in self.rows])


@dataclass(frozen=True)
class FigureResult:
    """A figure that is drawn when it is asked for."""

    draw: Callable[[], Figure]
    trials: tuple[str, ...] = ()  # a schematic has none
    notes: tuple[str, ...] = ()


Table = TableResult | NoData | NotPlanned
Picture = FigureResult | NoData | NotPlanned
MakeTable = Callable[["Results"], Table]
MakeFigure = Callable[["Results"], Picture]


def _record(row: TableRow, columns: tuple[str, ...]) -> dict[str, Any]:
    record: dict[str, Any] = {"metric": row.title, "unit": row.unit}
    for column, cell in zip(columns, row.cells, strict=True):
        ours: float | str
        interval, n = None, 0
        if isinstance(cell.ours, Value):
            ours, interval, n = cell.ours.mean, cell.ours.interval, cell.ours.n
        elif isinstance(cell.ours, Setting):
            ours = f"{cell.ours.text} (assumed)" if cell.ours.assumed else cell.ours.text
        else:
            ours = why_missing(cell.ours)
        values = {
            "paper": cell.paper,
            "ours": ours,
            "difference": cell.difference,
            "low": interval.low if interval else None,
            "high": interval.high if interval else None,
            "seeds": n,
        }
        record |= {f"{column}: {name}": value for name, value in values.items()}
    return record
