"""The data of a test: differences of pairs, an arm's own numbers, counts of events, or the reason for having none."""

from __future__ import annotations

from dataclasses import dataclass

from fewbits.analysis.engine.statistics.estimates import Shared, Spread
from fewbits.analysis.engine.statistics.multiplicity import Stratum


@dataclass(frozen=True)
class Differences:
    """The differences of a comparison's pairs, or an arm's own numbers, with the ids of the trials that they are from.

    "Ours" is the arm that is compared with the baseline.
    """

    values: tuple[float, ...]  # ours minus baseline, for the pairs in which neither trial diverged
    relative: bool = False  # the values are fractions of the baseline's level
    trials: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what is missing or is not compared
    diverged: int = 0  # pairs in which ours diverged and the baseline did not
    baseline_diverged: int = 0  # pairs in which the baseline diverged and ours did not
    spread: Spread | None = None  # the spread of differences, pooled over more arms than these two
    shared: Shared | None = None  # the error from the choice of evaluation documents, which all seeds share
    unit: str = "seed"  # the unit of replication
    bounds: tuple[float, float] | None = None  # limits of a value: (0, 1) for shares, (-1, 1) for their differences

    @property
    def pairs(self) -> int:
        return len(self.values) + self.diverged + self.baseline_diverged

    def shown(self, value: float) -> str:
        return f"{value:+.3%}" if self.relative else f"{value:+.4g}"


@dataclass(frozen=True)
class Events:
    """Counts of an event in the trials of ours and of the baseline, for each stratum."""

    strata: tuple[Stratum, ...]
    trials: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exact:
    """The result of a check that arithmetic or code decides, at any scale."""

    holds: bool
    detail: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoData:
    """The reason why the planned trials give nothing to test."""

    reason: str
    trials: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotPlanned:
    """The case that the sweeps of this scale do not have the arms."""

    reason: str


Data = Differences | NoData
Measured = Differences | Events | NoData | NotPlanned
