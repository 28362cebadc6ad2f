"""Statistics of paired differences over few seeds, as pure functions. A "spread" is a standard deviation here.

The arms of a comparison have the same initial weights and order of data in each seed. So each seed gives one
independent number: the difference between its two trials. Steps and tensors of one trial are not independent of each
other. The differences are assumed to be normal with an unknown spread (Student's t).

If many arms share the seeds, a common spread can be estimated from all of them: from the residuals that remain after
subtraction of each arm's mean and each seed's mean (`pooled`). It has more degrees of freedom than the spread of one
pair: with three seeds, two arms give 2 degrees and twelve arms give 22. Kinds of arms that differ in their spreads are
pooled separately (`pooled_by_kind`). `estimate` has the rule by which a pooled spread is used;
docs/measured/statistics.md has its error rates.

A single value has no spread: its interval, error and p are None, never 0. If all values are equal, their signs are
tested: three equal values above 0 have p = 2^-3, not 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Array = NDArray[np.float64]
LEVEL = 0.95
ALPHA = 0.05
CAUTION = 1.25  # `estimate` multiplies a pooled spread by this factor


class Side(StrEnum):
    """The alternative hypothesis of a test: the true mean is greater or less than a given value."""

    ABOVE = "greater"
    BELOW = "less"


@dataclass(frozen=True)
class Interval:
    """A confidence interval from low to high."""

    low: float
    high: float
    level: float  # the confidence level, for example 0.95


@dataclass(frozen=True)
class Spread:
    """A standard deviation with its degrees of freedom."""

    sd: float
    df: int


@dataclass(frozen=True)
class Summary:
    """The mean of a sample with its confidence interval, and the standard deviation of the values."""

    mean: float
    sd: float | None  # the standard deviation of the values; None for a single value
    interval: Interval | None  # the interval of the mean; None for a single value


# -------------------------------------------------------------------------------- samples and pairs


def checked(values: ArrayLike, name: str = "values", least: int = 1) -> Array:
    """Return the values as a vector of finite numbers.

    Raise ValueError if there are fewer than `least` values, or if a value is not finite. name: the name of the values
    in the error's message.
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size < least:
        raise ValueError(f"{name}: expected a list of {least} or more numbers, not an array of shape {array.shape}")
    for place in np.flatnonzero(~np.isfinite(array)):
        raise ValueError(f"{name}[{place}] is {array[place]}, but must be finite")
    return array


def differences(ours: ArrayLike, baseline: ArrayLike, *, relative: bool = False) -> Array:
    """Return ours - baseline for each pair, in order; if relative, (ours - baseline) / |baseline|.

    Each pair is divided by its own baseline value, not by the mean over the pairs: a common denominator would have an
    error that all pairs share, so the pairs would not be independent.
    """
    a, b = checked(ours, "ours"), checked(baseline, "baseline")
    if a.size != b.size:
        raise ValueError(f"{a.size} values of ours and {b.size} of the baseline; pairs need equal numbers of both")
    if not relative:
        return a - b
    for place in np.flatnonzero(b == 0):
        raise ValueError(f"baseline[{place}] is 0, so the relative difference is not defined")
    return (a - b) / np.abs(b)


def pseudo_values(rows: Sequence[Mapping[str, float]], of: Callable[[Mapping[str, float]], float]) -> list[float]:
    """Return the jackknife's pseudo-value of each seed, for a number that is computed from means over the seeds.

    rows: for each seed, {name: number}. of: a function that computes the number from {name: mean over seeds}.
    With n seeds, the pseudo-value of a seed is n · of(means over all seeds) - (n - 1) · of(means without this seed).
    If `of` is linear, the pseudo-value is of(the seed's row). If `of` is a quotient, the mean of the pseudo-values
    estimates the quotient of the means, and the spread of the pseudo-values gives the error of this estimate; a mean of
    the seeds' quotients would depend on the few seeds whose denominator is close to 0.
    """
    if len(rows) < 2:
        return [of(row) for row in rows]
    whole, n = of(_means(rows)), len(rows)
    return [n * whole - (n - 1) * of(_means([row for k, row in enumerate(rows) if k != left])) for left in range(n)]


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}


def summary(values: ArrayLike, level: float = LEVEL) -> Summary:
    """Return the mean of the values with Student's t interval at this level, and their standard deviation."""
    estimated = estimate(values)
    if estimated is None:
        return Summary(float(checked(values)[0]), None, None)
    return Summary(estimated.mean, estimated.spread.sd, estimated.interval(level))


def median_interval(values: ArrayLike, level: float = LEVEL) -> Interval | None:
    """Return a confidence interval of the median from order statistics, valid for any continuous distribution.

    Return None if there are too few values for this level.
    """
    x = np.sort(checked(values))
    k = int(stats.binom.ppf((1 - fraction("level", level)) / 2, x.size, 0.5))
    return Interval(float(x[k - 1]), float(x[x.size - k]), level) if k else None


@dataclass(frozen=True)
class Pooled:
    """A group of arms that are assumed to have equal spreads.

    `spread` is the standard deviation over seeds of the difference between any two of these arms. It is estimated from
    all arms of the group together.
    """

    spread: Spread
    arms: frozenset[str]  # the names of the arms in the pool
    unlike: frozenset[str]  # arms that are not in the pool because their spread is significantly greater
    means: tuple[float, ...]  # for each seed, the mean over the arms
    distinct: int  # the number of arms; arms with equal values in every seed count once


@dataclass(frozen=True)
class Pools:
    """One pool (see Pooled) for each kind of arm; the spreads of arms of one kind are assumed to be equal."""

    of_kinds: Mapping[str, Pooled]  # kind → pool

    @property
    def arms(self) -> frozenset[str]:
        """The names of the arms in all pools."""
        return frozenset().union(*(pool.arms for pool in self.of_kinds.values()))

    @property
    def unlike(self) -> frozenset[str]:
        """The arms that are not in their kind's pool because their spread is significantly greater than the others'."""
        return frozenset().union(*(pool.unlike for pool in self.of_kinds.values()))

    def of(self, *arms: str) -> Spread | None:
        """Return the spread of the difference between two arms; None if one of them is in no pool.

        The two arms may be of the same kind or of different kinds.
        """
        if not self.arms.issuperset(arms):
            return None
        pools = [pool for pool in self.of_kinds.values() if pool.arms.intersection(arms)]
        return pools[0].spread if len(pools) == 1 else _across(*pools)


def _across(one: Pooled, other: Pooled) -> Spread:
    """Return the spread of the difference between an arm of one kind and an arm of another kind.

    Its variance is the sum of three variances: the variance over seeds of the difference between the two kinds' means,
    and, for each of the two arms, the variance about the mean of its kind. The first one is needed because a seed may
    change all arms of a kind. The degrees of freedom follow from Satterthwaite's formula.
    """
    between = differences(one.means, other.means)
    parts = [(float(between.var(ddof=1)), between.size - 1)]
    parts += [(pool.spread.sd**2 / 2 * (1 - 1 / pool.distinct), pool.spread.df) for pool in (one, other)]
    variance = sum(part for part, _ in parts)
    if not variance:
        return Spread(0.0, between.size - 1)
    return Spread(math.sqrt(variance), int(variance**2 / sum(part**2 / df for part, df in parts)))


def pooled_by_kind(arms: Mapping[str, Sequence[float]], kinds: Mapping[str, str]) -> Pools | None:
    """Estimate a common spread for the arms of each kind (see `pooled`), and return the pools of all kinds.

    arms: arm → its values, for the same seeds in the same order. kinds: arm → its kind, any name for the group of arms
    whose spreads are assumed to be equal. A kind with only one arm has no pool. Return None if no kind has a pool.
    """
    by_kind: dict[str, dict[str, Sequence[float]]] = {}
    for name, values in arms.items():
        by_kind.setdefault(kinds[name], {})[name] = values
    pools = {kind: pool for kind, members in by_kind.items() if (pool := pooled(members)) is not None}
    return Pools(pools) if pools else None


def pooled(arms: Mapping[str, Sequence[float]]) -> Pooled | None:
    """Return the pool of these arms: the arms that are assumed to have equal spreads, and their common spread.

    arms: arm → its values, for the same seeds in the same order. The pool's spread is computed from the residuals that
    remain after subtraction of each arm's mean and each seed's mean. If there are three or more arms, an arm whose
    spread is significantly greater than that of the others is excluded (F test at 5 % in total, Bonferroni). Then the
    remaining arms are tested again. Arms with equal values in every seed count once. Return None if fewer than two arms
    or two seeds remain.
    """
    sizes = {len(values) for values in arms.values()}
    if len(sizes) > 1:
        raise ValueError(
            f"the arms have {', '.join(map(str, sorted(sizes)))} values: pooling needs the same number from every arm"
        )
    kept = dict.fromkeys(tuple(checked(values, name)) for name, values in arms.items())
    while len(kept) >= 2 and min(sizes) >= 2:
        rows = list(kept)
        p = [_unlike(rows, place) if len(rows) > 2 else 1.0 for place in range(len(rows))]
        if min(p) >= ALPHA / len(rows):
            names = frozenset(name for name, values in arms.items() if tuple(checked(values, name)) in kept)
            array = np.array(rows)
            spread, means = _residual(array), tuple(array.mean(axis=0).tolist())
            pair = Spread(spread.sd * math.sqrt(2), spread.df)
            return Pooled(pair, names, frozenset(arms) - names, means, len(rows))
        del kept[rows[int(np.argmin(p))]]
    return None


def _residual(rows: Array) -> Spread:
    """Return the spread of an array (arms × seeds) after subtraction of the means of its rows and columns."""
    left = rows - rows.mean(axis=1, keepdims=True) - rows.mean(axis=0, keepdims=True) + rows.mean()
    df = (rows.shape[0] - 1) * (rows.shape[1] - 1)
    return Spread(math.sqrt(float((left**2).sum()) / df), df)


def _unlike(rows: Sequence[Sequence[float]], place: int) -> float:
    """Return the p value of an F test; it is small if row number `place` has a greater spread than the other rows.

    rows: the values of each arm. The test compares two spreads: that of the row's differences from the mean of the
    other rows, and the residual spread of the other rows (`_residual`). Return 1 if the residual spread is 0.
    """
    others = np.array([row for i, row in enumerate(rows) if i != place])
    own = np.asarray(rows[place], np.float64) - others.mean(axis=0)
    known = _residual(others)
    if not known.sd:
        return 1.0
    expected = known.sd**2 * (1 + 1 / len(others))
    return float(special.fdtrc(own.size - 1, known.df, own.var(ddof=1) / expected))


# -------------------------------------------------------------------------------- tests on differences


@dataclass(frozen=True)
class Shared:
    """A standard error that more seeds do not reduce, for example the error due to the choice of evaluation text."""

    error: float
    df: int  # its degrees of freedom


@dataclass(frozen=True)
class Estimate:
    """The mean of n values with its standard error; tests and intervals use Student's t."""

    n: int
    mean: float
    spread: Spread  # the spread behind `error`: the values' own, or CAUTION · pooled spread
    error: float  # the standard error of the mean
    df: float  # the degrees of freedom of the error
    own: bool  # True if `spread` is the values' own, False if it is pooled

    def p(self, against: float, side: Side) -> float:
        """Return the p value of the one-sided test of the null hypothesis "the true mean is `against`".

        side: the alternative, that the true mean is above or below `against`.
        """
        distance = self.mean - against
        if side is Side.BELOW:
            distance = -distance
        if not self.error:  # all values are equal: an exact test of their signs
            return 0.5**self.n if distance > 0 else 1.0
        return float(special.stdtr(self.df, -distance / self.error))

    def interval(self, level: float) -> Interval:
        """Return the two-sided confidence interval of the mean at this level, for example 0.9."""
        half = float(special.stdtrit(self.df, (1 + fraction("level", level)) / 2)) * self.error
        return Interval(self.mean - half, self.mean + half, level)


def estimate(values: ArrayLike, pooled: Spread | None = None, shared: Shared | None = None) -> Estimate | None:
    """Return the mean of two or more values with its standard error; None for one value.

    pooled: a spread that was estimated from more arms. The estimate uses `pooled` times the factor CAUTION or, if it is
    larger, the spread of the values themselves. Reason: an arm whose spread is twice that of the others often stays in
    the pool. With the plain pooled spread, 8 to 11 % of this arm's comparisons would be significant by chance instead
    of 5 % (docs/measured/statistics.md). shared: a standard error that more values do not reduce; its square is added
    to the square of the values' standard error.
    """
    x = checked(values)
    if x.size < 2:
        return None
    own = Spread(float(x.std(ddof=1)) if np.ptp(x) else 0.0, x.size - 1)
    wide = None if pooled is None else Spread(CAUTION * pooled.sd, pooled.df)
    use = own if wide is None or own.sd > wide.sd else wide
    error, df = use.sd / math.sqrt(x.size), float(use.df)
    if shared is not None and shared.error:
        parts = [(error**2, df), (shared.error**2, shared.df)]
        total = sum(part for part, _ in parts)
        error, df = math.sqrt(total), total**2 / sum(part**2 / part_df for part, part_df in parts)
    return Estimate(x.size, float(x.mean()), use, error, df, use is own)


# -------------------------------------------------------------------------------- details


def fraction(name: str, value: float) -> float:
    """Return the value; raise ValueError unless 0 < value < 1. name: the value's name in the error's message."""
    if not 0 < value < 1:
        raise ValueError(f"{name} is {value}, but must be a number between 0 and 1")
    return value


def positive(name: str, value: float) -> None:
    """Raise ValueError unless the value is positive and finite. name: the value's name in the error's message."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} is {value}, but must be a positive number")
