"""Statistics of paired differences over few seeds, as pure functions.

The arms of a comparison have the same initial weights and order of data in each seed, so each seed gives one
independent number: the difference between its two trials. The differences are assumed to be normal with an unknown
standard deviation: without further errors, `Estimate.p` is the p value of scipy's `ttest_1samp` or `ttest_rel`. A
single value has no standard deviation, and no interval or p unless a `noise` was measured elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats
from statsmodels.stats.multitest import multipletests

LEVEL = 0.95
ALPHA = 0.05
LAST_TOKENS = 0.5  # the slope of a loss over tokens is that of this last part of the tokens
FEWEST_POINTS = 3  # of a curve that has a slope


class Side(StrEnum):
    """The alternative hypothesis of a test: the true mean is greater or less than a given value."""

    ABOVE = "greater"
    BELOW = "less"


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    level: float  # the confidence level, for example 0.95

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Error:
    error: float
    df: float


@dataclass(frozen=True)
class Estimate:
    """The mean of n values with its standard error; tests and intervals use Student's t."""

    n: int
    mean: float
    error: float  # the standard error of the mean
    df: float  # its degrees of freedom

    def p(self, against: float, side: Side) -> float:
        """Return the p value of the one-sided test of "the true mean is `against`"; 0 or 1 if all values are equal."""
        distance = (self.mean - against) * (1 if side is Side.ABOVE else -1)
        if not self.error:
            return 0.0 if distance > 0 else 1.0
        return float(special.stdtr(self.df, -distance / self.error))

    def interval(self, level: float) -> Interval:
        """Return the two-sided confidence interval of the mean at this level, for example 0.9."""
        half = float(special.stdtrit(self.df, (1 + level) / 2)) * self.error if self.error else 0.0
        return Interval(self.mean - half, self.mean + half, level)


def estimate(values: ArrayLike, shared: Error | None = None, noise: Error | None = None) -> Estimate | None:
    """Return the mean of the values with its standard error; None for one value without a known error.

    shared: an error that more values do not reduce, such as that of the choice of evaluated documents. noise: the error
    of a single value, which takes the place of the spread if there is only one value. The degrees of freedom of a sum
    of errors follow from Satterthwaite's formula.
    """
    x = _finite(values)
    own = Error(float(x.std(ddof=1)) / math.sqrt(x.size) if np.ptp(x) else 0.0, x.size - 1) if x.size > 1 else noise
    parts = [part for part in (own, shared) if part is not None]
    if not parts:
        return None
    variance = sum(part.error**2 for part in parts)
    df = variance**2 / sum(part.error**4 / part.df for part in parts) if variance else parts[0].df
    return Estimate(x.size, float(x.mean()), math.sqrt(variance), df)


def median_interval(values: ArrayLike) -> Interval | None:
    """Return a 95 % confidence interval of the median from order statistics; None if there are too few values."""
    x = np.sort(_finite(values))
    k = int(stats.binom.ppf((1 - LEVEL) / 2, x.size, 0.5))
    return Interval(float(x[k - 1]), float(x[x.size - k]), LEVEL) if k else None


def _finite(values: ArrayLike) -> NDArray[np.float64]:
    """Return the values as a vector; raise ValueError if it is empty or has a value that is not finite."""
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ValueError(f"expected a list of one or more finite numbers, not {array}")
    return array


def pseudo_values(rows: Sequence[Mapping[str, float]], of: Callable[[Mapping[str, float]], float]) -> list[float]:
    """Return the jackknife's pseudo-value of each seed, for a number that is computed from means over the seeds.

    rows: for each seed, {name: number}. of: a function that computes the number from {name: mean over seeds}.
    With n seeds, the pseudo-value of a seed is n · of(means over all seeds) - (n - 1) · of(means without this seed).
    If `of` is a quotient, their mean estimates the quotient of the means, and their spread gives its error; a mean of
    the seeds' quotients would depend on the few seeds whose denominator is close to 0.
    """
    if len(rows) < 2:
        return [of(row) for row in rows]
    whole, n = of(_means(rows)), len(rows)
    return [n * whole - (n - 1) * of(_means([row for k, row in enumerate(rows) if k != left])) for left in range(n)]


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}


def fisher(events: int, trials: int, baseline_events: int, baseline_trials: int) -> tuple[float, float]:
    """Return the p values of Fisher's exact test for the alternatives "more events in our arm" and "fewer events"."""
    table = [[events, trials - events], [baseline_events, baseline_trials - baseline_events]]
    more, less = (float(stats.fisher_exact(table, alternative=side).pvalue) for side in ("greater", "less"))
    return more, less


def adjusted(p: Sequence[float], method: str) -> list[float]:
    """Return p values corrected for their number: by `holm` for any false positive, by `fdr_bh` for their share."""
    return [float(value) for value in multipletests(p, method=method)[1]] if p else []


# -------------------------------------------------------------------------------- extra tokens


def relative_slope(curves: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Return by which fraction of itself a loss falls per unit of ln(tokens), on average; None if it does not."""
    found = []
    for curve in curves:
        points = [(math.log(tokens), loss) for tokens, loss in curve if tokens >= LAST_TOKENS * curve[-1][0] > 0]
        if len(points) >= FEWEST_POINTS:
            x, y = np.array(points).T
            found.append(-float(np.polyfit(x - x.mean(), y, 1)[0]) / float(y[-1]))
    slope = sum(found) / len(found) if found else 0.0
    return slope if slope > 0 else None


def extra_tokens(change: float, slope: float) -> float:
    """Return how many more tokens the baseline would need to lose as much, as a fraction of its tokens.

    Loss falls nearly linearly in the logarithm of the number of tokens. If it falls by the fraction `slope`
    (`relative_slope`) for each unit of ln(tokens), a relative change g of the loss is worth exp(g / slope) - 1 more
    tokens: "0.15 % of loss = 0.8 % more tokens".
    """
    return math.expm1(min(change / slope, 50.0))


def extra_interval(interval: Interval, slope: float) -> Interval:
    """Return the interval of the extra tokens; it has the error of the change, not that of the slope."""
    return Interval(extra_tokens(interval.low, slope), extra_tokens(interval.high, slope), interval.level)
