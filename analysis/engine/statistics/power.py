"""Power of the paired t-test, one-sided at ALPHA: the effect that some seeds detect, the seeds that an effect needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from scipy import optimize, special, stats

from fewbits.analysis.engine.statistics.estimates import ALPHA, CAUTION, Array, Estimate, positive

POWER = 0.80  # the probability with which a minimum detectable effect is detected
MOST_SEEDS = 200  # if a design needs more seeds, messages do not say how many


def power(effect: float, sd: float, n: int, df: int | None = None) -> float:
    """Return the probability that the test of n pairs detects a true mean difference, exactly, by the noncentral t.

    df: the degrees of freedom of the spread, if it is known from more than these pairs.
    """
    if n < 2:
        raise ValueError(f"n {n}: a test needs at least 2 pairs")
    positive("sd", sd)
    df = n - 1 if df is None else df
    estimates, weight = _chi(df)
    return _detected(abs(effect) / sd, n, float(stats.t.isf(ALPHA, df)) * estimates, weight)


def minimum_detectable_effect(sd: float, n: int, df: int | None = None) -> float:
    """Return the true mean difference that n pairs detect with probability POWER.

    sd: the measured spread of paired differences. df: its degrees of freedom, if more than these pairs determine it.
    """
    return sd * _effect_in_spreads(n, n - 1 if df is None else df)


def required_n(sd: float, effect: float, most: int = 10_000, each: float = 1.0) -> int | None:
    """Return the fewest pairs that detect the effect with probability POWER; None if more than `most` are needed.

    each: the degrees of freedom that every pair after the first adds; more than one if the spread is pooled over arms.
    """
    positive("effect", effect)

    def detected(n: int) -> float:
        return minimum_detectable_effect(sd, n, max(1, round(each * (n - 1))))

    low, high = 2, 2
    while detected(high) > effect:
        if high == most:
            return None
        low, high = high + 1, min(high * 2, most)
    while low < high:  # bisection: the detected effect decreases with n
        middle = (low + high) // 2
        if detected(middle) > effect:
            low = middle + 1
        else:
            high = middle
    return high


def detectable(estimated: Estimate) -> float | None:
    """Return the smallest true effect that the one-sided test of this estimate detects with probability POWER.

    Return None if all values are equal: then their signs are tested, and that test does not depend on a size.
    """
    if not estimated.error:
        return None
    return minimum_detectable_effect(estimated.error * math.sqrt(estimated.n), estimated.n, max(1, int(estimated.df)))


def seeds_needed(estimated: Estimate, margin: float) -> int | None:
    """Return the fewest seeds that detect an effect of the margin's size; None if more than MOST_SEEDS are needed."""
    if not estimated.error:
        return estimated.n
    each = max(1.0, estimated.df / (estimated.n - 1))
    return required_n(estimated.error * math.sqrt(estimated.n), margin, MOST_SEEDS, each)


def planned_effect(sd: float, df: int, n: int) -> float | None:
    """Return the true effect that a one-sided test of n planned pairs detects with probability POWER.

    sd, df: the pooled spread of earlier runs. The rule of `statistics.estimate` applies: the pooled spread is widened,
    and if the pairs' own spread happens to be larger, it is used with its n - 1 degrees of freedom. Return None if n
    is less than 2.
    """
    return None if n < 2 else sd * _planned_in_spreads(n, max(df, n - 1))


# -------------------------------------------------------------------------------- details


def _detected(effect: float, n: int, critical: Array, weight: Array) -> float:
    """Return the probability that n pairs detect an effect, in units of the true spread.

    critical: the least detected mean, in true standard errors, for each estimate of the spread; weight: the estimates'
    probabilities. scipy's noncentral t is NaN for few pairs and large effects.
    """
    return float(weight @ special.ndtr(effect * math.sqrt(n) - critical))


@cache
def _chi(df: int) -> tuple[Array, Array]:
    """Return values of chi / √df, the estimate of a spread of 1, and their weights in Gauss-Legendre quadrature."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    low, high = stats.chi.ppf(1e-13, df), stats.chi.isf(1e-13, df)
    values = low + (high - low) * (nodes + 1) / 2
    return values / math.sqrt(df), weights * (high - low) / 2 * stats.chi.pdf(values, df)


@cache
def _effect_in_spreads(n: int, df: int) -> float:
    return _effect_of(lambda effect: power(effect, 1.0, n, df))


@cache
def _planned_in_spreads(n: int, df: int) -> float:
    own, weight = _chi(n - 1)  # the distribution of the pairs' own spread if the true spread is 1
    pooled = float(stats.t.isf(ALPHA, df)) * CAUTION
    critical = np.where(own <= CAUTION, pooled, float(stats.t.isf(ALPHA, n - 1)) * own)
    return _effect_of(lambda effect: _detected(effect, n, critical, weight))


def _effect_of(probability: Callable[[float], float]) -> float:
    """Return the effect that is detected with probability POWER."""
    high = 1.0
    while probability(high) < POWER:
        high *= 2
    return float(optimize.brentq(lambda effect: probability(effect) - POWER, 0.0, high))
