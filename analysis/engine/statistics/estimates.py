"""Statistics of paired differences over few seeds, as pure functions.

The arms of a comparison share initial weights and the order of the data in each seed. So the unit of replication is the
seed, with one number: the difference of the pair. Steps and tensors of one trial are not independent of each other.
Differences are assumed to be normal with an unknown spread (Student's t); a spread is a standard deviation.

If many arms share the seeds, the residuals of all arms, after subtraction of each arm's and each seed's mean, give a
common spread with more degrees of freedom than that of a pair (`pooled`): with three seeds, two arms have 2 and twelve
arms have 22. Arms that chance affects by different amounts are not pooled with each other (`pooled_by_kind`). The rule
by which a pooled spread is used is in `estimate`; docs/measured/pooling.md has the error rates of this rule.

One value has no spread: its interval, error and p are None, never 0. Values that are all equal are tested by their
signs: three equal values above 0 have p = 2^-3, not 0. Values that are not finite raise a ValueError with their index.
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
    """The alternative hypothesis of a test."""

    ABOVE = "greater"
    BELOW = "less"


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float
    level: float


@dataclass(frozen=True)
class Spread:
    """A standard deviation with its degrees of freedom."""

    sd: float
    df: int


@dataclass(frozen=True)
class Summary:
    """The mean of a sample, with the spread of its values and its interval; these are None for a single value."""

    mean: float
    sd: float | None  # the spread of the values
    interval: Interval | None  # interval of the mean


# -------------------------------------------------------------------------------- samples and pairs


def checked(values: ArrayLike, name: str = "values", least: int = 1) -> Array:
    """Return the values as a vector of finite numbers.

    Raise ValueError, with the name and the index, if there are fewer values than `least` or one is not finite.
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size < least:
        raise ValueError(f"{name}: expected a list of {least} or more numbers, not an array of shape {array.shape}")
    for place in np.flatnonzero(~np.isfinite(array)):
        raise ValueError(f"{name}[{place}] is {array[place]}, but must be finite")
    return array


def differences(ours: ArrayLike, baseline: ArrayLike, *, relative: bool = False) -> Array:
    """Return the difference of each pair, in order.

    relative: divide it by the baseline's value in the same pair. A common denominator would have an error of its own,
    and the seeds would not be independent replicates.
    """
    a, b = checked(ours, "ours"), checked(baseline, "baseline")
    if a.size != b.size:
        raise ValueError(f"{a.size} values of ours and {b.size} of the baseline; pairs need equal numbers")
    if not relative:
        return a - b
    for place in np.flatnonzero(b == 0):
        raise ValueError(f"baseline[{place}] is 0, so there is no relative difference")
    return (a - b) / np.abs(b)


def pseudo_values(rows: Sequence[Mapping[str, float]], of: Callable[[Mapping[str, float]], float]) -> list[float]:
    """Return the jackknife's pseudo-value of each seed, for a number that is computed from means over the seeds.

    rows: the seeds' numbers by name. Where `of` is linear, a pseudo-value is the seed's own number. Where it divides,
    the mean of the pseudo-values is the quotient of the means with less bias, and their spread gives its error. The
    mean of the seeds' own quotients would depend on the few seeds whose denominator happens to be close to 0.
    """
    if len(rows) < 2:
        return [of(row) for row in rows]
    whole, n = of(_means(rows)), len(rows)
    return [n * whole - (n - 1) * of(_means([row for k, row in enumerate(rows) if k != left])) for left in range(n)]


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}


def summary(values: ArrayLike, level: float = LEVEL) -> Summary:
    """Return the mean with the spread of the values and Student's t interval."""
    estimated = estimate(values)
    if estimated is None:
        return Summary(float(checked(values)[0]), None, None)
    return Summary(estimated.mean, estimated.spread.sd, estimated.interval(level))


def median_interval(values: ArrayLike, level: float = LEVEL) -> Interval | None:
    """Return an interval of the median, from order statistics, for any distribution; None for too few values."""
    x = np.sort(checked(values))
    k = int(stats.binom.ppf((1 - fraction("level", level)) / 2, x.size, 0.5))
    return Interval(float(x[k - 1]), float(x[x.size - k]), level) if k else None


@dataclass(frozen=True)
class Pooled:
    """The pooled spread, over seeds, of the difference between any two arms of a group."""

    spread: Spread
    arms: frozenset[str]
    unlike: frozenset[str]  # arms that are left out because their own spread is significantly greater
    means: tuple[float, ...]  # the mean over the arms, for each seed
    distinct: int  # the number of arms that are not equal to another in every seed


@dataclass(frozen=True)
class Pools:
    """A pool of arms for each kind; the kinds may have different spreads."""

    of_kinds: Mapping[str, Pooled]

    @property
    def arms(self) -> frozenset[str]:
        return frozenset().union(*(pool.arms for pool in self.of_kinds.values()))

    @property
    def unlike(self) -> frozenset[str]:
        return frozenset().union(*(pool.unlike for pool in self.of_kinds.values()))

    def of(self, *arms: str) -> Spread | None:
        """Return the spread of a difference between arms of one kind or of two; None if an arm is in no pool."""
        if not self.arms.issuperset(arms):
            return None
        pools = [pool for pool in self.of_kinds.values() if pool.arms.intersection(arms)]
        return pools[0].spread if len(pools) == 1 else _across(*pools)


def _across(one: Pooled, other: Pooled) -> Spread:
    """Return the spread of a difference between an arm of one kind and an arm of another.

    Its variance is that of the difference between the kinds' means, since a seed may move a whole kind, plus the
    variances of each arm about the mean of its kind. The degrees of freedom are Satterthwaite's.
    """
    between = differences(one.means, other.means)
    parts = [(float(between.var(ddof=1)), between.size - 1)]
    parts += [(pool.spread.sd**2 / 2 * (1 - 1 / pool.distinct), pool.spread.df) for pool in (one, other)]
    variance = sum(part for part, _ in parts)
    if not variance:
        return Spread(0.0, between.size - 1)
    return Spread(math.sqrt(variance), int(variance**2 / sum(part**2 / df for part, df in parts)))


def pooled_by_kind(arms: Mapping[str, Sequence[float]], kinds: Mapping[str, str]) -> Pools | None:
    """Pool the arms of each kind as `pooled` does; return None if no kind has a pool.

    arms: values by the arm's name, for the same seeds in one order. kinds: the kind of each arm. The only arm of a kind
    is in no pool.
    """
    by_kind: dict[str, dict[str, Sequence[float]]] = {}
    for name, values in arms.items():
        by_kind.setdefault(kinds[name], {})[name] = values
    pools = {kind: pool for kind, members in by_kind.items() if (pool := pooled(members)) is not None}
    return Pools(pools) if pools else None


def pooled(arms: Mapping[str, Sequence[float]]) -> Pooled | None:
    """Pool arms' values: return the residual spread of the two-way layout arms × seeds.

    arms: values by the arm's name, for the same seeds in one order. The arms are assumed to have equal spreads, as they
    do if trials differ by chance. If there are three or more, an arm with a greater spread than the others is left out
    (F test at 5 % over all arms). Arms that are equal in every seed count once. Return None if fewer than two arms or
    seeds are left.
    """
    sizes = {len(values) for values in arms.values()}
    if len(sizes) > 1:
        raise ValueError(f"arms of {', '.join(map(str, sorted(sizes)))} seeds: pooling needs equal numbers")
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
    """Return the spread that is left after subtraction of the rows' and the columns' means."""
    left = rows - rows.mean(axis=1, keepdims=True) - rows.mean(axis=0, keepdims=True) + rows.mean()
    df = (rows.shape[0] - 1) * (rows.shape[1] - 1)
    return Spread(math.sqrt(float((left**2).sum()) / df), df)


def _unlike(rows: Sequence[Sequence[float]], place: int) -> float:
    """Return the p value of an F test that the row spreads more about the others' mean than they do themselves."""
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
    """A standard error that all seeds share and more seeds do not reduce, such as from the choice of documents."""

    error: float
    df: int


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error; its tests and intervals are Student's t."""

    n: int
    mean: float
    spread: Spread  # the spread in use: the values' own, or the pooled one times CAUTION
    error: float
    df: float
    own: bool  # the spread is the values' own

    def p(self, against: float, side: Side) -> float:
        """Return the p value of the hypothesis that the true mean is `against`, for the alternative `side`."""
        distance = self.mean - against
        if side is Side.BELOW:
            distance = -distance
        if not self.error:  # all values are equal: an exact test of their signs
            return 0.5**self.n if distance > 0 else 1.0
        return float(special.stdtr(self.df, -distance / self.error))

    def interval(self, level: float) -> Interval:
        """Return the two-sided interval of the mean."""
        half = float(special.stdtrit(self.df, (1 + fraction("level", level)) / 2)) * self.error
        return Interval(self.mean - half, self.mean + half, level)


def estimate(values: ArrayLike, pooled: Spread | None = None, shared: Shared | None = None) -> Estimate | None:
    """Return the mean of two or more values with its error; None for one value.

    pooled: a spread known from more than these values. It is multiplied by CAUTION, and used only if the values' own
    spread is not larger than that. Without this rule, an arm that spreads twice as far as the others, which stays in
    the pool in most runs, would differ significantly in 8 to 11 % of comparisons instead of 5 %
    (docs/measured/pooling.md). shared: an error to add that does not decrease with the number of values.
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
    """Return the value; raise ValueError unless it is between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} {value}: expected a number between 0 and 1")
    return value


def positive(name: str, value: float) -> None:
    """Raise ValueError unless the value is positive and finite."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} {value}: expected a positive number")
