"""Power of the paired t-test: the effect that a number of seeds detects, and the seeds that an effect needs."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from scipy import optimize, special, stats

from fewbits.analysis.engine.statistics import ALPHA, CAUTION, Array, Estimate, fraction, positive

POWER = 0.80  # the probability with which a minimum detectable effect is detected


def power(effect: float, sd: float, n: int, alpha: float = ALPHA, sides: int = 2, df: int | None = None) -> float:
    """Return the probability that a paired t-test detects a true mean difference, exactly, by the noncentral t.

    df: the degrees of freedom of the spread, if it is known from more than these pairs.
    """
    _design(n, alpha, sides)
    positive("sd", sd)
    df = n - 1 if df is None else df
    shift, critical = abs(effect) / sd * math.sqrt(n), float(stats.t.isf(alpha / sides, df))
    other = _noncentral_tail(critical, df, -shift) if sides == 2 else 0.0
    return _noncentral_tail(critical, df, shift) + other


def _noncentral_tail(critical: float, df: int, shift: float) -> float:
    """Return P((Z + shift) / S > critical) with S = chi / √df, since scipy's is NaN for few pairs and large effects."""
    scale, weight = _chi(df)
    return float(weight @ special.ndtr(shift - critical * scale))


@cache
def _chi(df: int) -> tuple[Array, Array]:
    """Return values of chi / √df, the estimate of a spread of 1, and their weights in Gauss-Legendre quadrature."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    low, high = stats.chi.ppf(1e-13, df), stats.chi.isf(1e-13, df)
    values = low + (high - low) * (nodes + 1) / 2
    return values / math.sqrt(df), weights * (high - low) / 2 * stats.chi.pdf(values, df)


def minimum_detectable_effect(
    sd: float | None, n: int, alpha: float = ALPHA, chance: float = POWER, sides: int = 2, df: int | None = None
) -> float | None:
    """Return the true mean difference that n pairs detect with probability `chance`; None if it is not known.

    sd: the measured spread of paired differences. df: its degrees of freedom, if more than these pairs determine it.
    """
    fraction("power", chance)
    if n < 2 or sd is None:
        return None
    return sd * _effect_in_spreads(n, alpha, chance, sides, n - 1 if df is None else df)


@cache
def _effect_in_spreads(n: int, alpha: float, chance: float, sides: int, df: int) -> float:
    high = 1.0
    while power(high, 1.0, n, alpha, sides, df) < chance:
        high *= 2
    return float(optimize.brentq(lambda effect: power(effect, 1.0, n, alpha, sides, df) - chance, 0.0, high))


def required_n(
    sd: float,
    effect: float,
    alpha: float = ALPHA,
    chance: float = POWER,
    sides: int = 2,
    most: int = 10_000,
    each: float = 1.0,
) -> int | None:
    """Return the fewest pairs that detect the effect with probability `chance`; None if more than `most` are needed.

    each: the degrees of freedom that every pair after the first adds; more than one if the spread is pooled over arms.
    """
    positive("effect", effect)

    def detected(n: int) -> float:
        return sd * _effect_in_spreads(n, alpha, chance, sides, max(1, round(each * (n - 1))))

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


def _design(n: int, alpha: float, sides: int) -> None:
    fraction("alpha", alpha)
    if n < 2:
        raise ValueError(f"n {n}: a test needs at least 2 pairs")
    if sides not in (1, 2):
        raise ValueError(f"sides {sides}: valid values are 1 and 2")


def detectable(estimated: Estimate) -> float | None:
    """Return the smallest true effect that the one-sided test of this estimate detects with probability POWER.

    Return None if all values are equal: then their signs are tested, and that test does not depend on a size.
    """
    if not estimated.error:
        return None
    return minimum_detectable_effect(
        estimated.error * math.sqrt(estimated.n), estimated.n, sides=1, df=max(1, int(estimated.df))
    )


def seeds_needed(estimated: Estimate, margin: float, most: int = 200) -> int | None:
    """Return the fewest seeds that detect an effect of the margin's size; None if more than `most` are needed."""
    if not estimated.error:
        return estimated.n
    return required_n(
        estimated.error * math.sqrt(estimated.n),
        margin,
        sides=1,
        most=most,
        each=max(1.0, estimated.df / (estimated.n - 1)),
    )


def planned_effect(sd: float, df: int, n: int, alpha: float = ALPHA, chance: float = POWER) -> float | None:
    """Return the true effect that a one-sided test of n planned pairs detects with probability `chance`.

    sd, df: the pooled spread of earlier runs. The rule of `statistics.estimate` applies: the pooled spread is widened,
    and if the pairs' own spread happens to be larger, it is used with its n - 1 degrees of freedom. Return None if n
    is less than 2.
    """
    if n < 2:
        return None
    return sd * _planned_in_spreads(n, max(df, n - 1), alpha, chance)


@cache
def _planned_in_spreads(n: int, df: int, alpha: float, chance: float) -> float:
    own, weight = _chi(n - 1)  # the distribution of the pairs' own spread if the true spread is 1
    pooled = float(stats.t.isf(alpha, df)) * CAUTION
    critical = np.where(own <= CAUTION, pooled, float(stats.t.isf(alpha, n - 1)) * own)

    def excess_power(effect: float) -> float:
        return float(weight @ special.ndtr(effect * math.sqrt(n) - critical)) - chance

    high = 1.0
    while excess_power(high) < 0:
        high *= 2
    return float(optimize.brentq(excess_power, 0.0, high))
