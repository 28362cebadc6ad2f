"""Exact stratified tests of event counts, and Holm's correction of p values for multiple tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fewbits.analysis.engine.statistics.estimates import ALPHA


@dataclass(frozen=True)
class Stratum:
    """The numbers of trials of our arm and the baseline, with and without an event, under one condition.

    A condition is, for example, one learning rate.
    """

    name: str
    our_events: int  # our arm's trials with the event
    our_trials: int  # all trials of our arm
    baseline_events: int  # the baseline's trials with the event
    baseline_trials: int  # all trials of the baseline

    def __post_init__(self) -> None:
        if not (0 <= self.our_events <= self.our_trials and 0 <= self.baseline_events <= self.baseline_trials):
            raise ValueError(
                f"stratum {self.name}: {self.our_events} of {self.our_trials} and {self.baseline_events} of "
                f"{self.baseline_trials} trials have the event: of N trials, 0 to N can have it"
            )

    def ways(self) -> list[int]:
        """Return a list: element k is the number of ways to choose the trials with the event so that k are our arm's.

        k goes from 0 to the number of our arm's trials. Each choice has as many trials as have the event in this
        stratum; those that are not our arm's are the baseline's.
        """
        events = self.our_events + self.baseline_events
        return [
            math.comb(self.our_trials, k) * math.comb(self.baseline_trials, events - k) if events >= k else 0
            for k in range(self.our_trials + 1)
        ]


@dataclass(frozen=True)
class EventTest:
    """One-sided p values of an exact test of how often an event occurs in our arm and in the baseline."""

    more: float  # p value for the alternative that the event is more frequent in our arm
    fewer: float  # p value for the alternative that the event is less frequent in our arm
    least_more: float  # the least value of `more` that is possible with this number of events in each stratum
    least_fewer: float  # the least value of `fewer` that is possible with this number of events in each stratum


def compare_events(strata: Sequence[Stratum]) -> EventTest:
    """Return the p values of an exact test that compares how often the event occurs in our arm and in the baseline.

    The test statistic is the number of events in our arm, summed over the strata; the total number of events in each
    stratum is taken as fixed. For one stratum, this is Fisher's exact test. Strata in which all trials or no trials
    have the event do not change the p values.
    """
    ways = [1]
    for stratum in strata:
        ways = _convolve(ways, stratum.ways())
    total = sum(ways)
    ours = sum(stratum.our_events for stratum in strata)
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
    """Return the p values after Holm's correction, in the order of p.

    If corrected values up to alpha count as significant, the probability of one or more false positives among all tests
    is at most alpha.

    least: the least p value that is possible for each test. If it is given, Tarone's rule selects the tests to correct:
    it takes the least k such that at most k tests have least <= alpha / k, and corrects only these tests. The corrected
    p of all other tests is 1. So an exact test of few events, which could never be significant, does not reduce the
    power of the other tests.
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
