"""The statistics that verdicts rest on: few seeds, paired, and no assumption that is not said. Pure functions.

Arms of a comparison share initial weights and the order of the data seed by seed, so what is looked at is one number
for each seed: the difference of the pair. Differences are taken as normal, their spread as unknown (Student's t), and
the seed is the unit of replication: neither steps nor tensors of one trial are independent of each other.

Where many arms share the seeds, what is left of all of them once arms and seeds have their means is one spread, better
known than that of any pair (`pooled`): three seeds of two arms have two degrees of freedom, of twelve arms 22. Arms
that chance pushes differently hard are not pooled with each other (`pooled_by_kind`).

One value has no spread: its interval, error and p are None, never 0. Values that are all equal have a spread of 0: the
interval is a point, and tests are taken in that limit. What is not finite is refused, by its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

Array = NDArray[np.float64]
LEVEL = 0.95
ALPHA, POWER = 0.05, 0.80


class Side(StrEnum):
    """Which alternative a test looks for."""

    BOTH = "two-sided"
    ABOVE = "greater"
    BELOW = "less"


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    level: float

    def within(self, low: float, high: float) -> bool:
        return low < self.low and self.high < high


@dataclass(frozen=True)
class Spread:
    """A standard deviation, and the degrees of freedom with which it is known."""

    sd: float
    df: int


@dataclass(frozen=True)
class Summary:
    """Of a sample's mean."""

    n: int
    mean: float
    spread: Spread | None  # of the values
    error: float | None  # standard error of the mean
    interval: Interval | None

    @property
    def sd(self) -> float | None:
        return self.spread.sd if self.spread else None


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


def summary(values: ArrayLike, level: float = LEVEL, spread: Spread | None = None) -> Summary:
    """Mean, standard error and Student's t interval. spread: known from more than these values."""
    x = checked(values)
    mean = float(x.mean())
    if spread is None:
        if x.size == 1:
            return Summary(1, mean, None, None, None)
        spread = Spread(float(x.std(ddof=1)) if np.ptp(x) else 0.0, x.size - 1)
    error = spread.sd / math.sqrt(x.size)
    half = float(stats.t.ppf((1 + _part("level", level)) / 2, spread.df)) * error
    return Summary(x.size, mean, spread, error, Interval(mean - half, mean + half, level))


def median_interval(values: ArrayLike, level: float = LEVEL) -> Interval | None:
    """Of the median, by order statistics, whatever the distribution; None of too few."""
    x = np.sort(checked(values))
    k = int(stats.binom.ppf((1 - _part("level", level)) / 2, x.size, 0.5))
    return Interval(float(x[k - 1]), float(x[x.size - k]), level) if k else None


@dataclass(frozen=True)
class Pooled:
    """The spread of a difference between any two of these arms, pair by pair."""

    spread: Spread
    arms: frozenset[str]
    unlike: frozenset[str]  # arms left out: their own spread is greater than chance makes it
    means: tuple[float, ...]  # over the arms, seed by seed
    distinct: int  # arms

    def of(self, *arms: str) -> Spread | None:
        """None where it does not speak of one of them."""
        return self.spread if self.arms.issuperset(arms) else None


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


def t_test(
    values: ArrayLike, against: float = 0.0, side: Side = Side.BOTH, spread: Spread | None = None
) -> float | None:
    """p of the paired t-test: how often differences whose true mean is `against` would lie so far to that side."""
    s = summary(values, spread=spread)
    if s.error is None or s.spread is None:
        return None
    distance = s.mean - against
    t = distance / s.error if s.error else math.copysign(math.inf, distance) if distance else 0.0
    if side is Side.BOTH:
        return float(2 * stats.t.sf(abs(t), s.spread.df))
    return float(stats.t.sf(t if side is Side.ABOVE else -t, s.spread.df))


def equivalence(values: ArrayLike, margin: float, spread: Spread | None = None) -> float | None:
    """p of TOST: two one-sided tests that the mean is not below -margin and not above margin; the worse of the two."""
    _positive("margin", margin)
    low, high = t_test(values, -margin, Side.ABOVE, spread), t_test(values, margin, Side.BELOW, spread)
    return None if low is None or high is None else max(low, high)


def non_inferiority(values: ArrayLike, margin: float) -> float | None:
    """p of the test that the mean lies below margin, where more is worse."""
    _positive("margin", margin)
    return t_test(values, margin, Side.BELOW)


def ordering(arms: Sequence[ArrayLike]) -> float | None:
    """p that arms[0] > arms[1] > …, values paired by place: all neighbours must be in order (intersection-union), so
    the worst of their one-sided p is a test of the whole at its own level."""
    if len(arms) < 2:
        raise ValueError(f"an order of {len(arms)} arms: two or more are expected")
    found = [t_test(differences(a, b), side=Side.ABOVE) for a, b in pairwise(arms)]
    return None if None in found else max(p for p in found if p is not None)


def sign_test(values: ArrayLike, side: Side = Side.BOTH) -> float:
    """p, exact, of as many differences on one side; those of 0 say nothing. Assumes no distribution, and for that
    needs five seeds to reach 0.05."""
    x = checked(values)
    above, below = int((x > 0).sum()), int((x < 0).sum())
    return 1.0 if above + below == 0 else float(stats.binomtest(above, above + below, 0.5, str(side)).pvalue)


def more_events(ours: int, of_ours: int, theirs: int, of_theirs: int) -> float:
    """p, Fisher's exact test, that an event (divergence, say) is more frequent in ours. Three of three beside none of
    three is the least that reaches 0.05."""
    if not (0 <= ours <= of_ours and 0 <= theirs <= of_theirs and of_ours and of_theirs):
        raise ValueError(f"{ours} of {of_ours} and {theirs} of {of_theirs} are no counts")
    both = ours + theirs
    ways = [math.comb(of_ours, k) * math.comb(of_theirs, both - k) for k in range(min(of_ours, both) + 1)]
    return sum(ways[ours:]) / sum(ways)  # of integers, so that one in twenty is 0.05 and not a little more


# -------------------------------------------------------------------------------- power


def power(effect: float, sd: float, n: int, alpha: float = ALPHA, sides: int = 2, df: int | None = None) -> float:
    """Of the paired t-test: how often it finds a true mean difference, by the noncentral t, exact. df: with which the
    spread is known, where more than these pairs tell it."""
    _design(n, alpha, sides)
    _positive("sd", sd)
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
    _part("power", chance)
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
    _positive("effect", effect)

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


# -------------------------------------------------------------------------------- ratios, shares, many tests


def ratio(ours: ArrayLike, baseline: ArrayLike, level: float = LEVEL) -> tuple[float, Interval | None]:
    """The geometric mean of ours / baseline over pairs, with its interval: t on the logarithms.

    On the log scale because errors, throughputs and losses of arms differ by factors: the answer is the same with the
    two swapped, never crosses 0, and is finite with few pairs, which Fieller's interval need not be.
    """
    a, b = checked(ours, "ours"), checked(baseline, "baseline")
    for name, values in (("ours", a), ("baseline", b)):
        for place in np.flatnonzero(values <= 0):
            raise ValueError(f"{name}[{place}] is {values[place]}: a ratio is of positive numbers")
    s = summary(differences(np.log(a), np.log(b)), level)
    interval = s.interval and Interval(math.exp(s.interval.low), math.exp(s.interval.high), level)
    return math.exp(s.mean), interval


def wilson(count: int, total: int, level: float = LEVEL) -> Interval:
    """Wilson's interval of a share of independent items (answers to questions; not tensors of one trial)."""
    if not 0 <= count <= total or total < 1:
        raise ValueError(f"{count} of {total} is no share")
    z = float(stats.norm.ppf((1 + _part("level", level)) / 2))
    share, weight = count / total, z * z / total
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight * weight / 4) / (1 + weight)
    return Interval(max(0.0, centre - half), min(1.0, centre + half), level)


def holm(p: Sequence[float]) -> list[float]:
    """p corrected so that, over all of them together, a false finding is no likelier than the level; in place."""
    corrected, highest = [0.0] * len(p), 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if not 0 <= p[place] <= 1:
            raise ValueError(f"p[{place}] is {p[place]}: a number from 0 to 1 is expected")
        highest = max(highest, min(1.0, p[place] * (len(p) - rank)))
        corrected[place] = highest
    return corrected


# -------------------------------------------------------------------------------- details


def _design(n: int, alpha: float, sides: int) -> None:
    _part("alpha", alpha)
    if n < 2:
        raise ValueError(f"n {n}: a test needs 2 pairs or more")
    if sides not in (1, 2):
        raise ValueError(f"sides {sides}: valid are 1 and 2")


def _part(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise ValueError(f"{name} {value}: a number between 0 and 1 is expected")
    return value


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} {value}: a positive number is expected")
