"""What runs deliver to a test: differences of pairs, counts of events, or the reason why there is nothing to test."""

from __future__ import annotations

from dataclasses import dataclass

from fewbits.analysis.engine.statistics import Spread


@dataclass(frozen=True)
class Differences:
    """Of the pairs of one comparison, with what they were made from."""

    values: tuple[float, ...]  # ours minus baseline, of pairs of which neither diverged
    relative: bool = False  # to the baseline's level
    trials: tuple[str, ...] = ()  # ids of all behind it
    notes: tuple[str, ...] = ()  # what is missing, stale or otherwise to be said
    diverged: int = 0  # pairs in which ours diverged and the baseline did not
    baseline_diverged: int = 0  # the other way round
    spread: Spread | None = None  # of differences, where more than these pairs tell it

    @property
    def pairs(self) -> int:
        return len(self.values) + self.diverged + self.baseline_diverged

    def shown(self, value: float) -> str:
        return f"{value:+.3%}" if self.relative else f"{value:+.4g}"


@dataclass(frozen=True)
class NoData:
    """In place of differences, where there are none to look at."""

    reason: str
    trials: tuple[str, ...] = ()


Data = Differences | NoData
