"""Define the data that claims are tested on: differences of pairs, an arm's numbers, counts of events, or no data."""

from __future__ import annotations

from dataclasses import dataclass

from fewbits.analysis.engine.statistics import Error


@dataclass(frozen=True)
class Differences:
    """Differences of a comparison's pairs (arm minus baseline), or the numbers of one arm, with one value per seed."""

    values: tuple[float, ...]  # differences: only of pairs in which neither trial diverged
    relative: bool = False  # the values are fractions of the baseline's number
    trials: tuple[str, ...] = ()  # the ids of the trials that the values are computed from
    notes: tuple[str, ...] = ()  # which trials are missing or are not compared, and why
    diverged: int = 0  # the number of pairs in which the arm's trial diverged and the baseline's did not
    baseline_diverged: int = 0  # the number of pairs in which the baseline's trial diverged and the arm's did not
    shared: Error | None = None  # the error from the choice of evaluation documents, which all seeds share
    noise: Error | None = None  # the error of a single value, from A/A comparisons; used if there is one seed
    slope: float | None = None  # of the baseline's relative loss over ln(tokens), if the values are changes of a loss
    observed: bool = False  # a single value may be compared without an error, such as a share of one run's tensors
    unit: str = "seed"  # the unit of replication, for messages: each value belongs to one seed
    bounds: tuple[float, float] | None = None  # limits of a value: (0, 1) for shares, (-1, 1) for their differences

    @property
    def pairs(self) -> int:
        """The number of pairs, including those in which one trial diverged."""
        return len(self.values) + self.diverged + self.baseline_diverged

    def shown(self, value: float) -> str:
        """Return a value as text with its sign, in percent if the values are relative."""
        return f"{value:+.3%}" if self.relative else f"{value:+.4g}"


@dataclass(frozen=True)
class Events:
    """Counts of an event, such as divergence, among the trials of an arm and of its baseline."""

    events: int
    of: int  # all trials of the arm
    baseline_events: int
    baseline_of: int
    trials: tuple[str, ...] = ()  # ids
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exact:
    """The result of a check by arithmetic or code, which needs no trained network."""

    holds: bool
    detail: str  # the numbers behind the result
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoData:
    """The value in place of data if the arms are planned but no number is available; `reason` says why."""

    reason: str
    trials: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotPlanned:
    """The value in place of data if the sweeps of this scale do not have the arms."""

    reason: str


@dataclass(frozen=True)
class CannotFail:
    """The value in place of data if no result of these runs could oppose the statement; `reason` says why."""

    reason: str
    trials: tuple[str, ...] = ()


Data = Differences | NoData
Measured = Differences | Events | NoData | NotPlanned | CannotFail
