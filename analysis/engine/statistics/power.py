"""Power of the one-sided paired t-test at level ALPHA, for the planning of runs."""

from __future__ import annotations

import math

from scipy import optimize, stats

from fewbits.analysis.engine.statistics.estimates import ALPHA

POWER = 0.80  # the probability with which a test detects a true effect of the minimum detectable size
MOST_SEEDS = 200  # if more seeds are needed, messages say "more than 200"


def power(effect: float, sd: float, n: int) -> float:
    """Return the probability that the test of n pairs is significant if the true mean difference is `effect`.

    sd: the standard deviation of the differences over seeds.
    """
    if n < 2 or sd <= 0:
        raise ValueError(f"n {n}, sd {sd}: a test needs at least 2 pairs, and a positive standard deviation")
    return float(stats.nct.sf(stats.t.isf(ALPHA, n - 1), n - 1, abs(effect) / sd * math.sqrt(n)))


def minimum_detectable_effect(sd: float, n: int) -> float:
    """Return the true mean difference that a test of n pairs detects with probability POWER."""
    if n < 2 or sd <= 0:
        raise ValueError(f"n {n}, sd {sd}: a test needs at least 2 pairs, and a positive standard deviation")
    high = 1.0
    while power(high, 1.0, n) < POWER:
        high *= 1.5
    return sd * float(optimize.brentq(lambda effect: power(effect, 1.0, n) - POWER, 0.0, high))


def required_n(sd: float, effect: float) -> int | None:
    """Return the least number of pairs that detects the effect with probability POWER; None if above MOST_SEEDS."""
    return next((n for n in range(2, MOST_SEEDS + 1) if minimum_detectable_effect(sd, n) <= effect), None)
