"""Power of the paired t-test: what a number of seeds can detect, and how many seeds an effect takes."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from scipy import optimize, special, stats

from fewbits.analysis.engine.statistics import ALPHA, CAUTION, Array, Estimate, fraction, positive

POWER = 0.80


def power(effect: float, sd: float, n: int, alpha: float = ALPHA, sides: int = 2, df: int | None = None) -> float:
    """Of the paired t-test: how often it finds a true mean difference, by the noncentral t, exact. df: with which the
    spread is known, where more than these pairs tell it."""
    _design(n, alpha, sides)
    positive("sd", sd)
    df = n - 1 if df is None else df
    shift, critical = abs(effect) / sd * math.sqrt(n), float(stats.t.isf(alpha / sides, df))
    other = _noncentral_tail(critical, df, -shift) if sides == 2 else 0.0
    return _noncentral_tail(critical, df, shift) + other


def _noncentral_tail(critical: float, df: int, shift: float) -> float:
    """P((Z + shift) / S > critical) over S = chi / √df: scipy's own is NaN for few pairs and large effects."""

    scale, weight = _chi(df)
    return float(weight @ special.ndtr(shift - critical * scale))


@cache
def _chi(df: int) -> tuple[Array, Array]:
    """The estimate of a spread of 1: its values, and how likely they are, by Gauss-Legendre."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    low, high = stats.chi.ppf(1e-13, df), stats.chi.isf(1e-13, df)
    values = low + (high - low) * (nodes + 1) / 2
    return values / math.sqrt(df), weights * (high - low) / 2 * stats.chi.pdf(values, df)


def minimum_detectable_effect(
    sd: float | None, n: int, alpha: float = ALPHA, chance: float = POWER, sides: int = 2, df: int | None = None
) -> float | None:
    """The true mean difference that n pairs find with that chance, from the measured spread of paired differences."""
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
    """The fewest pairs that find such an effect with that chance; None where more than `most`. each: degrees of freedom
    that every pair after the first brings, more than one where other arms share the seeds."""
    positive("effect", effect)

    def found(n: int) -> float:
        return sd * _effect_in_spreads(n, alpha, chance, sides, max(1, round(each * (n - 1))))

    low, high = 2, 2
    while found(high) > effect:
        if high == most:
            return None
        low, high = high + 1, min(high * 2, most)
    while low < high:  # what can be found shrinks with n
        middle = (low + high) // 2
        if found(middle) > effect:
            low = middle + 1
        else:
            high = middle
    return high


def _design(n: int, alpha: float, sides: int) -> None:
    fraction("alpha", alpha)
    if n < 2:
        raise ValueError(f"n {n}: a test needs 2 pairs or more")
    if sides not in (1, 2):
        raise ValueError(f"sides {sides}: valid are 1 and 2")


def detectable(found: Estimate) -> float | None:
    """Return the smallest true effect that one side of this estimate's test finds four times of five.

    None where all values are equal: their signs are tested, and a size means nothing to that test.
    """
    if not found.error:
        return None
    return minimum_detectable_effect(found.error * math.sqrt(found.n), found.n, sides=1, df=max(1, int(found.df)))


def seeds_needed(found: Estimate, margin: float, most: int = 200) -> int | None:
    """Return the fewest seeds that detect an effect of the margin's size; None for more than `most`."""
    if not found.error:
        return found.n
    return required_n(
        found.error * math.sqrt(found.n), margin, sides=1, most=most, each=max(1.0, found.df / (found.n - 1))
    )


def planned_effect(sd: float, df: int, n: int, alpha: float = ALPHA, chance: float = POWER) -> float | None:
    """Return the true effect that n planned pairs detect with that chance, one-sided, given a spread from earlier runs.

    It takes account of the rule of `statistics.estimate`: the spread is widened, and where chance makes a pair's own
    spread larger than that, its own n - 1 degrees of freedom decide.
    """
    if n < 2:
        return None
    return sd * _planned_in_spreads(n, max(df, n - 1), alpha, chance)


@cache
def _planned_in_spreads(n: int, df: int, alpha: float, chance: float) -> float:
    own, weight = _chi(n - 1)  # a pair's own spread, beside a true one of 1
    pooled = float(stats.t.isf(alpha, df)) * CAUTION
    critical = np.where(own <= CAUTION, pooled, float(stats.t.isf(alpha, n - 1)) * own)

    def missed(effect: float) -> float:
        return float(weight @ special.ndtr(effect * math.sqrt(n) - critical)) - chance

    high = 1.0
    while missed(high) < 0:
        high *= 2
    return float(optimize.brentq(missed, 0.0, high))
