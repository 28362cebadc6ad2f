"""Express a relative change of a loss as extra tokens: how many more tokens the baseline would need to lose as much.

Loss falls nearly linearly in the logarithm of the number of tokens. If a baseline's relative loss falls by s for each
unit of ln(tokens), an arm that is worse by the fraction g of the loss is worth exp(g / s) - 1 more tokens: "0.15 % of
loss = 0.8 % more tokens".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fewbits.analysis.engine.statistics.estimates import Interval

LAST = 0.5  # the slope is that of the last half of the tokens
FEWEST = 3  # points of a curve


def relative_slope(curves: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Return by which fraction of itself a loss falls for each unit of ln(tokens), near the end; None if it does not.

    curves: for each seed, the points (tokens, loss) of the baseline's curve, including its trunk's. The slope is a
    least-squares fit to the points of the last half of the tokens, and the result is the mean over the curves.
    """
    found = []
    for curve in curves:
        points = [(math.log(tokens), loss) for tokens, loss in curve if tokens >= LAST * curve[-1][0] > 0]
        if len(points) >= FEWEST:
            x, y = np.array(points).T
            found.append(-float(np.polyfit(x - x.mean(), y, 1)[0]) / float(y[-1]))
    slope = sum(found) / len(found) if found else 0.0
    return slope if slope > 0 else None


def extra_tokens(change: float, slope: float) -> float:
    """Return the fraction of tokens that a relative change of the loss is worth. slope: as `relative_slope` has it."""
    return math.expm1(min(change / slope, 50.0))


def extra_interval(interval: Interval, slope: float) -> Interval:
    """Return the interval of the extra tokens; it has the error of the change, not that of the slope."""
    return Interval(extra_tokens(interval.low, slope), extra_tokens(interval.high, slope), interval.level)
