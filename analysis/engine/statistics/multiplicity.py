"""Exact tests of events in strata, and Holm's correction of many tests, without those that cannot succeed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fewbits.analysis.engine.statistics.estimates import ALPHA


@dataclass(frozen=True)
class Stratum:
    """Counts of the trials of two arms under one condition (such as a learning rate), and of those with the event."""

    name: str
    ours: int  # our arm's trials with the event
    of_ours: int  # all trials of our arm
    theirs: int  # the baseline's trials with the event
    of_theirs: int  # all trials of the baseline

    def __post_init__(self) -> None:
        if not (0 <= self.ours <= self.of_ours and 0 <= self.theirs <= self.of_theirs):
            raise ValueError(f"{self.name}: {self.ours} of {self.of_ours} and {self.theirs} of {self.of_theirs}")

    def ways(self) -> list[int]:
        """Return in how many ways the stratum's events can be distributed over its trials.

        Item k of the list counts the ways in which k of the events are in trials of ours.
        """
        events = self.ours + self.theirs
        return [
            math.comb(self.of_ours, k) * math.comb(self.of_theirs, events - k) if events >= k else 0
            for k in range(self.of_ours + 1)
        ]


@dataclass(frozen=True)
class EventTest:
    """One-sided p values of an exact test of events."""

    more: float  # for: the event is more frequent in ours
    fewer: float  # for: it is less frequent in ours
    least_more: float  # the least `more` that is possible with this number of events
    least_fewer: float  # the least possible `fewer`


def compare_events(strata: Sequence[Stratum]) -> EventTest:
    """Return the exact test that is conditional on the number of events in each stratum (with one, Fisher's test).

    The statistic is the number of events in ours over all strata. So strata in which all trials or none have the event
    do not weaken the test, and three seeds at each of three learning rates can give a significant result where three
    seeds at one learning rate cannot.
    """
    ways = [1]
    for stratum in strata:
        ways = _convolve(ways, stratum.ways())
    total = sum(ways)
    ours = sum(stratum.ours for stratum in strata)
    possible = [k for k, count in enumerate(ways) if count]
    return EventTest(
        sum(ways[ours:]) / total,  # a quotient of integers, so that 1 of 20 gives exactly 0.05
        sum(ways[: ours + 1]) / total,
        ways[possible[-1]] / total,
        ways[possible[0]] / total,
    )


def _convolve(a: Sequence[int], b: Sequence[int]) -> list[int]:
    sums = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            sums[i + j] += x * y
    return sums


def holm(p: Sequence[float], least: Sequence[float] | None = None, alpha: float = ALPHA) -> list[float]:
    """Return the p values after Holm's correction, in their order.

    The probability of any false finding among all tests is then at most alpha. least: the least p that each test can
    reach. Tests that cannot reach alpha / k, for the least k such that at most k tests can, are left out (Tarone), and
    their corrected p is 1. So an exact test of few events does not cost the others power.
    """
    for place, value in enumerate(p):
        if not 0 <= value <= 1:
            raise ValueError(f"p[{place}] is {value}, but must be a number from 0 to 1")
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
