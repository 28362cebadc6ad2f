"""What runs deliver to a test: differences of pairs, an arm's numbers, counts of events, or why there is nothing."""

from __future__ import annotations

from dataclasses import dataclass

from fewbits.analysis.engine.multiplicity import Stratum
from fewbits.analysis.engine.statistics import Shared, Spread


@dataclass(frozen=True)
class Differences:
    """The differences of one comparison's pairs, or an arm's own numbers, with the trials behind them."""

    values: tuple[float, ...]  # ours minus baseline, of pairs of which neither diverged
    relative: bool = False  # to the baseline's level
    trials: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what is missing or stale
    diverged: int = 0  # pairs in which ours diverged and the baseline did not
    baseline_diverged: int = 0  # the other way round
    spread: Spread | None = None  # of differences, pooled over more arms than these two
    shared: Shared | None = None  # the error of the documents that all seeds are evaluated on
    unit: str = "seed"  # of replication
    bounds: tuple[float, float] | None = None  # of each value: (0, 1) of shares, (-1, 1) of differences of shares

    @property
    def pairs(self) -> int:
        return len(self.values) + self.diverged + self.baseline_diverged

    def shown(self, value: float) -> str:
        return f"{value:+.3%}" if self.relative else f"{value:+.4g}"


@dataclass(frozen=True)
class Events:
    """In how many trials of ours and of the baseline an event occurred, stratum by stratum."""

    strata: tuple[Stratum, ...]
    trials: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exact:
    """What arithmetic or code shows, at any scale."""

    holds: bool
    detail: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoData:
    """The reason why there is nothing to test."""

    reason: str
    trials: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotPlanned:
    """The scale's sweeps do not have these arms."""

    reason: str


Data = Differences | NoData
Measured = Differences | Events | NoData | NotPlanned
