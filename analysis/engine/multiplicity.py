"""Events in strata, tested exactly; and the correction of many tests at once, which leaves out what cannot succeed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fewbits.analysis.engine.statistics import ALPHA


@dataclass(frozen=True)
class Stratum:
    """Trials of two arms under one condition (a learning rate, say), and in how many of them the event occurred."""

    name: str
    ours: int
    of_ours: int
    theirs: int
    of_theirs: int

    def __post_init__(self) -> None:
        if not (0 <= self.ours <= self.of_ours and 0 <= self.theirs <= self.of_theirs):
            raise ValueError(f"{self.name}: {self.ours} of {self.of_ours} and {self.theirs} of {self.of_theirs}")

    def ways(self) -> list[int]:
        """Return, for each number of ours, in how many ways the stratum's events fall so among its trials."""
        events = self.ours + self.theirs
        return [
            math.comb(self.of_ours, k) * math.comb(self.of_theirs, events - k) if events >= k else 0
            for k in range(self.of_ours + 1)
        ]


@dataclass(frozen=True)
class EventTest:
    more: float  # p that the event is more frequent in ours
    fewer: float
    least_more: float  # the least p that as many events could have given
    least_fewer: float


def compare_events(strata: Sequence[Stratum]) -> EventTest:
    """Return the exact test, conditional on the number of events in each stratum (Fisher's with one stratum).

    Strata are summed, so that conditions in which every trial or none has the event cost nothing, and three seeds at
    three rates can succeed where three seeds at one cannot.
    """
    ways = [1]
    for stratum in strata:
        ways = _convolve(ways, stratum.ways())
    total = sum(ways)
    ours = sum(stratum.ours for stratum in strata)
    possible = [k for k, count in enumerate(ways) if count]
    return EventTest(
        sum(ways[ours:]) / total,  # of integers, so that one in twenty is 0.05 exactly
        sum(ways[: ours + 1]) / total,
        ways[possible[-1]] / total,
        ways[possible[0]] / total,
    )


def _convolve(a: Sequence[int], b: Sequence[int]) -> list[int]:
    found = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            found[i + j] += x * y
    return found


def holm(p: Sequence[float], least: Sequence[float] | None = None, alpha: float = ALPHA) -> list[float]:
    """Return p corrected by Holm so that a false finding among all of them is no likelier than alpha; in place.

    least: the least p that each test can reach. Tests that cannot reach alpha / k, where k tests can, are left out
    (Tarone), and their corrected p is 1: an exact test of few events does not cost the others power.
    """
    for place, value in enumerate(p):
        if not 0 <= value <= 1:
            raise ValueError(f"p[{place}] is {value}: a number from 0 to 1 is expected")
    family = _testable(least, alpha) if least is not None else list(range(len(p)))
    corrected, highest = [1.0] * len(p), 0.0
    for rank, place in enumerate(sorted(family, key=lambda i: p[i])):
        highest = max(highest, min(1.0, p[place] * (len(family) - rank)))
        corrected[place] = highest
    return corrected


def _testable(least: Sequence[float], alpha: float) -> list[int]:
    for k in range(1, len(least) + 1):
        able = [place for place, value in enumerate(least) if value <= alpha / k]
        if len(able) <= k:
            return able
    return []
