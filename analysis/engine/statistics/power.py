"""Power of the one-sided paired t-test at level ALPHA, and the number of pairs that detects an effect."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from scipy import optimize, special, stats

from fewbits.analysis.engine.statistics.estimates import ALPHA, CAUTION, Array, Estimate, positive

POWER = 0.80  # the probability with which a test detects a true effect of the minimum detectable size
MOST_SEEDS = 200  # if more seeds are needed, messages say "more than 200"


def power(effect: float, sd: float, n: int, df: int | None = None) -> float:
    """Return the probability that the test of n pairs is significant if the true mean difference is `effect`.

    sd: the true standard deviation of the differences. df: the degrees of freedom of the estimated spread; n - 1 if it
    is None. The probability is that of the noncentral t distribution.
    """
    if n < 2:
        raise ValueError(f"n {n}: a test needs at least 2 pairs")
    positive("sd", sd)
    df = n - 1 if df is None else df
    estimates, weight = _chi(df)
    return _detected(abs(effect) / sd, n, float(stats.t.isf(ALPHA, df)) * estimates, weight)


def minimum_detectable_effect(sd: float, n: int, df: int | None = None) -> float:
    """Return the true mean difference that a test of n pairs detects with probability POWER.

    sd: the standard deviation of the pairs' differences. df: the degrees of freedom of its estimate; n - 1 if None.
    """
    return sd * _effect_in_spreads(n, n - 1 if df is None else df)


def required_n(sd: float, effect: float, most: int = 10_000, each: float = 1.0) -> int | None:
    """Return the least number of pairs that detects the effect with probability POWER; None if it exceeds `most`.

    sd: the standard deviation of the pairs' differences. each: the number of degrees of freedom that each pair after
    the first one adds to the estimate of sd. It is more than 1 if sd is pooled over several arms.
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
    """Return the smallest true effect that a test with this estimate's error and df detects with probability POWER.

    Return None if the error is 0, because all values of the estimate are equal. `Estimate.p` then tests their signs,
    and this test has no minimum detectable effect.
    """
    if not estimated.error:
        return None
    return minimum_detectable_effect(estimated.error * math.sqrt(estimated.n), estimated.n, max(1, int(estimated.df)))


def seeds_needed(estimated: Estimate, margin: float) -> int | None:
    """Return the least number of seeds that detects an effect of the margin's size with probability POWER.

    The spread over seeds is taken from `estimated`. Return None if more than MOST_SEEDS seeds are needed. If all values
    behind `estimated` are equal, there is no spread; then return the number of these values.
    """
    if not estimated.error:
        return estimated.n
    each = max(1.0, estimated.df / (estimated.n - 1))
    return required_n(estimated.error * math.sqrt(estimated.n), margin, MOST_SEEDS, each)


def planned_effect(sd: float, df: int, n: int) -> float | None:
    """Return the true effect that a one-sided test of n planned pairs detects with probability POWER; None if n < 2.

    sd, df: the pooled spread of earlier runs and its degrees of freedom. The test follows the rule of
    `estimates.estimate`: it uses sd times the factor CAUTION or, if the spread of the n pairs happens to be larger, the
    spread of these pairs with its n - 1 degrees of freedom.
    """
    return None if n < 2 else sd * _planned_in_spreads(n, max(df, n - 1))


# -------------------------------------------------------------------------------- details


def _detected(effect: float, n: int, critical: Array, weight: Array) -> float:
    """Return the probability that a test of n pairs detects an effect.

    The probability is a weighted sum over possible values of the estimated spread. scipy's noncentral t distribution is
    not used, because it gives NaN for few pairs and large effects.

    effect: in units of the true standard deviation of the differences. critical: for each value of the estimated
    spread, the smallest mean that is significant, in units of the mean's true standard error. weight: the probability
    of each value of the estimated spread.
    """
    return float(weight @ special.ndtr(effect * math.sqrt(n) - critical))


@cache
def _chi(df: int) -> tuple[Array, Array]:
    """Return possible estimates of a standard deviation whose true value is 1, and the probability of each estimate.

    df: the degrees of freedom of the estimates. Their distribution is that of χ / √df; the returned values are the
    nodes of a Gauss-Legendre quadrature.
    """
    nodes, weights = np.polynomial.legendre.leggauss(200)
    low, high = stats.chi.ppf(1e-13, df), stats.chi.isf(1e-13, df)
    values = low + (high - low) * (nodes + 1) / 2
    return values / math.sqrt(df), weights * (high - low) / 2 * stats.chi.pdf(values, df)


@cache
def _effect_in_spreads(n: int, df: int) -> float:
    return _effect_of(lambda effect: power(effect, 1.0, n, df))


@cache
def _planned_in_spreads(n: int, df: int) -> float:
    own, weight = _chi(n - 1)  # the distribution of the n pairs' estimated spread, if the true spread is 1
    pooled = float(stats.t.isf(ALPHA, df)) * CAUTION
    critical = np.where(own <= CAUTION, pooled, float(stats.t.isf(ALPHA, n - 1)) * own)
    return _effect_of(lambda effect: _detected(effect, n, critical, weight))


def _effect_of(probability: Callable[[float], float]) -> float:
    """Return the effect that is detected with probability POWER.

    probability: an increasing function that returns the probability with which an effect is detected.
    """
    high = 1.0
    while probability(high) < POWER:
        high *= 2
    return float(optimize.brentq(lambda effect: probability(effect) - POWER, 0.0, high))
