"""Statistics of few seeds in pairs. Pure functions.

Arms of a comparison share initial weights and the order of the data seed by seed, so the unit is one number for each
seed: the difference of the pair. Differences are taken as normal with an unknown spread (Student's t); the seed is the
unit of replication, since neither steps nor tensors of one trial are independent of each other.

Where many arms share the seeds, the residuals of all arms, once arms and seeds have their means, give one spread that
is better known than that of any pair (`pooled`): three seeds of two arms have two degrees of freedom, of twelve arms
22.
Arms that chance pushes differently hard are not pooled with each other (`pooled_by_kind`). A pooled spread is used with
caution (`estimate`); docs/measured/pooling.md has the error rates of this rule.

One value has no spread: its interval, error and p are None, never 0. Values that are all equal are tested by signs:
three equal values above 0 have p = 2^-3, not 0. A value that is not finite is refused, by its index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Array = NDArray[np.float64]
LEVEL = 0.95
ALPHA = 0.05
CAUTION = 1.25  # a pooled spread is taken this much wider, see `estimate`


class Side(StrEnum):
    """Which alternative a test looks for."""

    ABOVE = "greater"
    BELOW = "less"


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    level: float


@dataclass(frozen=True)
class Spread:
    """A standard deviation, and the degrees of freedom with which it is known."""

    sd: float
    df: int


@dataclass(frozen=True)
class Summary:
    """A sample's mean with the spread of its values; of one value there is neither spread nor interval."""

    mean: float
    sd: float | None
    interval: Interval | None


# -------------------------------------------------------------------------------- samples and pairs


def checked(values: ArrayLike, name: str = "values", least: int = 1) -> Array:
    """As a vector of finite numbers. ValueError names the value that is none."""
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size < least:
        raise ValueError(f"{name}: a list of {least} or more numbers is expected, not one of shape {array.shape}")
    for place in np.flatnonzero(~np.isfinite(array)):
        raise ValueError(f"{name}[{place}] is {array[place]}: a finite number is expected")
    return array


def differences(ours: ArrayLike, baseline: ArrayLike, *, relative: bool = False) -> Array:
    """Of pairs, in order. Relative: to the baseline's level in the same pair, so that each seed is a whole replicate
    and no shared, itself uncertain, denominator ties them together."""
    a, b = checked(ours, "ours"), checked(baseline, "baseline")
    if a.size != b.size:
        raise ValueError(f"{a.size} values of ours and {b.size} of the baseline: they do not pair")
    if not relative:
        return a - b
    for place in np.flatnonzero(b == 0):
        raise ValueError(f"baseline[{place}] is 0: nothing is relative to it")
    return (a - b) / np.abs(b)


def summary(values: ArrayLike, level: float = LEVEL) -> Summary:
    """Return mean, spread and Student's t interval."""
    found = estimate(values)
    if found is None:
        return Summary(float(checked(values)[0]), None, None)
    return Summary(found.mean, found.spread.sd, found.interval(level))


def median_interval(values: ArrayLike, level: float = LEVEL) -> Interval | None:
    """Of the median, by order statistics, whatever the distribution; None of too few."""
    x = np.sort(checked(values))
    k = int(stats.binom.ppf((1 - fraction("level", level)) / 2, x.size, 0.5))
    return Interval(float(x[k - 1]), float(x[x.size - k]), level) if k else None


@dataclass(frozen=True)
class Pooled:
    """The spread of a difference between any two of these arms, pair by pair."""

    spread: Spread
    arms: frozenset[str]
    unlike: frozenset[str]  # arms left out: their own spread is greater than chance makes it
    means: tuple[float, ...]  # over the arms, seed by seed
    distinct: int  # arms


@dataclass(frozen=True)
class Pools:
    """Of arms of several kinds, which need not spread alike: a pool of each."""

    of_kinds: Mapping[str, Pooled]

    @property
    def arms(self) -> frozenset[str]:
        return frozenset().union(*(one.arms for one in self.of_kinds.values()))

    @property
    def unlike(self) -> frozenset[str]:
        return frozenset().union(*(one.unlike for one in self.of_kinds.values()))

    def of(self, *arms: str) -> Spread | None:
        """Of a difference between arms of one kind or of two. None where one of them is in no pool."""
        if not self.arms.issuperset(arms):
            return None
        there = [pool for pool in self.of_kinds.values() if pool.arms.intersection(arms)]
        return there[0].spread if len(there) == 1 else _across(*there)


def _across(one: Pooled, other: Pooled) -> Spread:
    """Of a difference between an arm of one kind and one of another. A seed may move one whole kind against the other:
    how far, their means say; to that comes how far arms are from their kinds'. Satterthwaite's degrees of freedom."""
    between = differences(one.means, other.means)
    parts = [(float(between.var(ddof=1)), between.size - 1)]
    parts += [(pool.spread.sd**2 / 2 * (1 - 1 / pool.distinct), pool.spread.df) for pool in (one, other)]
    variance = sum(part for part, _ in parts)
    if not variance:
        return Spread(0.0, between.size - 1)
    return Spread(math.sqrt(variance), int(variance**2 / sum(part**2 / df for part, df in parts)))


def pooled_by_kind(arms: Mapping[str, Sequence[float]], kinds: Mapping[str, str]) -> Pools | None:
    """kinds: of the arms. The only arm of a kind is in no pool."""
    of: dict[str, dict[str, Sequence[float]]] = {}
    for name, values in arms.items():
        of.setdefault(kinds[name], {})[name] = values
    found = {kind: pooled(one) for kind, one in of.items()}
    known = {kind: one for kind, one in found.items() if one is not None}
    return Pools(known) if known else None


def pooled(arms: Mapping[str, Sequence[float]]) -> Pooled | None:
    """Of arms' values, seed by seed in one order: the residual of a two-way layout, arms × seeds.

    Assumes that arms spread alike, as they do where trials part by chance; of three or more, an arm that does not is
    left out (F test of it beside the others, at 5 % over all arms). Arms that are equal in every seed count once. None
    of fewer than two.
    """
    sizes = {len(values) for values in arms.values()}
    if len(sizes) > 1:
        raise ValueError(f"arms of {', '.join(map(str, sorted(sizes)))} seeds: they do not pair")
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
    """Of values, once each row and each column has its mean."""
    left = rows - rows.mean(axis=1, keepdims=True) - rows.mean(axis=0, keepdims=True) + rows.mean()
    df = (rows.shape[0] - 1) * (rows.shape[1] - 1)
    return Spread(math.sqrt(float((left**2).sum()) / df), df)


def _unlike(rows: Sequence[Sequence[float]], place: int) -> float:
    """p that the row spreads no more about the others' mean than they do about theirs."""
    others = np.array([row for i, row in enumerate(rows) if i != place])
    own = np.asarray(rows[place], np.float64) - others.mean(axis=0)
    known = _residual(others)
    if not known.sd:
        return 1.0
    expected = known.sd**2 * (1 + 1 / len(others))
    return float(stats.f.sf(own.var(ddof=1) / expected, own.size - 1, known.df))


# -------------------------------------------------------------------------------- tests on differences


@dataclass(frozen=True)
class Shared:
    """An error that all seeds share and that more seeds do not reduce, such as that of the documents evaluated on."""

    error: float
    df: int


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error; tests and intervals are Student's t."""

    n: int
    mean: float
    spread: Spread  # the one in use: these values' own, or the pooled one
    error: float
    df: float
    own: bool  # the spread is these values' own

    def p(self, against: float, side: Side) -> float:
        """Return how often a true mean of `against` would give an estimate so far to that side."""
        distance = self.mean - against
        if side is Side.BELOW:
            distance = -distance
        if not self.error:  # values that are all equal: an exact test of their signs
            return 0.5**self.n if distance > 0 else 1.0
        return float(special.stdtr(self.df, -distance / self.error))

    def interval(self, level: float) -> Interval:
        half = float(special.stdtrit(self.df, (1 + fraction("level", level)) / 2)) * self.error
        return Interval(self.mean - half, self.mean + half, level)


def estimate(values: ArrayLike, pooled: Spread | None = None, shared: Shared | None = None) -> Estimate | None:
    """Return the mean of two or more values with its error; None for one value.

    pooled: a spread known from more than these values. It is taken CAUTION times as wide, and only where the values'
    own is no larger than that: else an arm that spreads twice as far as the others, which stays in the pool in most
    runs, would be found different in 9 to 11 % of comparisons in place of 5 % (docs/measured/pooling.md).
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
        error, df = math.sqrt(total), total**2 / sum(part**2 / of for part, of in parts)
    return Estimate(x.size, float(x.mean()), use, error, df, use is own)


# -------------------------------------------------------------------------------- details


def fraction(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f"{name} {value}: a number between 0 and 1 is expected")
    return value


def positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} {value}: a positive number is expected")
