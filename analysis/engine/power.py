"""Power of the paired t-test, one-sided at ALPHA: the effect that some seeds detect, the seeds that an effect takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from scipy import optimize, special, stats

from fewbits.analysis.engine.statistics import ALPHA, CAUTION, Array, Estimate, positive

POWER = 0.80
MOST_SEEDS = 200  # beyond which a design is only called too small


def power(effect: float, sd: float, n: int, df: int | None = None) -> float:
    """Return how often the test of n pairs finds a true mean difference.

    df: with which the spread is known, where more than these pairs tell it.
    """
    if n < 2:
        raise ValueError(f"n {n}: a test needs 2 pairs or more")
    positive("sd", sd)
    df = n - 1 if df is None else df
    estimates, weight = _chi(df)
    return _found(abs(effect) / sd, n, float(stats.t.isf(ALPHA, df)) * estimates, weight)


def minimum_detectable_effect(sd: float, n: int, df: int | None = None) -> float:
    """Return the true mean difference that n pairs find four times of five, given the spread of paired differences."""
    return sd * _effect_in_spreads(n, n - 1 if df is None else df)


def required_n(sd: float, effect: float, most: int = 10_000, each: float = 1.0) -> int | None:
    """Return the fewest pairs that find such an effect four times of five; None where more than `most`.

    each: degrees of freedom that every pair after the first brings, more than one where other arms share the seeds.
    """
    positive("effect", effect)

    def detected(n: int) -> float:
        return minimum_detectable_effect(sd, n, max(1, round(each * (n - 1))))

    low, high = 2, 2
    while detected(high) > effect:
        if high == most:
            return None
        low, high = high + 1, min(high * 2, most)
    while low < high:  # the detectable effect shrinks with n
        middle = (low + high) // 2
        if detected(middle) > effect:
            low = middle + 1
        else:
            high = middle
    return high


def detectable(found: Estimate) -> float | None:
    """Return the smallest true effect that one side of this estimate's test finds four times of five.

    None where all values are equal: their signs are tested, and a size means nothing to that test.
    """
    if not found.error:
        return None
    return minimum_detectable_effect(found.error * math.sqrt(found.n), found.n, max(1, int(found.df)))


def seeds_needed(found: Estimate, margin: float) -> int | None:
    """Return the fewest seeds that detect an effect of the margin's size; None for more than MOST_SEEDS."""
    if not found.error:
        return found.n
    return required_n(found.error * math.sqrt(found.n), margin, MOST_SEEDS, max(1.0, found.df / (found.n - 1)))


def planned_effect(sd: float, df: int, n: int) -> float | None:
    """Return the true effect that n planned pairs detect four times of five, given a spread from earlier runs.

    It takes account of the rule of `statistics.estimate`: the spread is widened, and where chance makes a pair's own
    spread larger than that, its own n - 1 degrees of freedom decide.
    """
    return None if n < 2 else sd * _planned_in_spreads(n, max(df, n - 1))


# -------------------------------------------------------------------------------- details


def _found(effect: float, n: int, critical: Array, weight: Array) -> float:
    """Return P((Z + shift) / S > t) over estimates S of the spread: scipy's own is NaN for few pairs and large effects.

    critical: the least mean in standard errors that is found, for each S; weight: how likely each S is.
    """
    return float(weight @ special.ndtr(effect * math.sqrt(n) - critical))


@cache
def _chi(df: int) -> tuple[Array, Array]:
    """Return the estimates of a spread of 1, and how likely they are, by Gauss-Legendre."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    low, high = stats.chi.ppf(1e-13, df), stats.chi.isf(1e-13, df)
    values = low + (high - low) * (nodes + 1) / 2
    return values / math.sqrt(df), weights * (high - low) / 2 * stats.chi.pdf(values, df)


@cache
def _effect_in_spreads(n: int, df: int) -> float:
    return _solved(lambda effect: power(effect, 1.0, n, df))


@cache
def _planned_in_spreads(n: int, df: int) -> float:
    own, weight = _chi(n - 1)  # a pair's own spread, beside a true one of 1
    pooled = float(stats.t.isf(ALPHA, df)) * CAUTION
    critical = np.where(own <= CAUTION, pooled, float(stats.t.isf(ALPHA, n - 1)) * own)
    return _solved(lambda effect: _found(effect, n, critical, weight))


def _solved(chance: Callable[[float], float]) -> float:
    """Return the effect that is found with the chance POWER."""
    high = 1.0
    while chance(high) < POWER:
        high *= 2
    return float(optimize.brentq(lambda effect: chance(effect) - POWER, 0.0, high))
