"""Simulate how often a test with pooled variance finds a difference between arms of equal mean but unequal variance.

    python docs/measured/pooling.py     # docs/measured/statistics.md discusses the results

The data are arrays arms × seeds of normal noise. One arm has `factor` times the standard deviation of the others, and
is compared with another arm, which has the same true mean. The rules for pooling are those of the functions `pooled`
and `estimate` in analysis/engine/statistics/estimates.py, here for all repetitions of the simulation at once.
"""

import numpy as np
from numpy.typing import NDArray
from scipy import special

from fewbits.analysis.engine.statistics.estimates import ALPHA, CAUTION

Array = NDArray[np.float64]
REPEATS = 8000  # simulated experiments for each row of the table


def t_tail(t: Array, df: Array | float) -> Array:
    return np.asarray(special.stdtr(df, -t))


def residual(x: Array, kept: NDArray[np.bool_]) -> tuple[Array, Array, Array]:
    """Return the residual variance of the kept arms, its degrees of freedom, and the mean of these arms for each seed.

    The residuals are those of the two-way layout arm + seed. x: the data, an array repeats × arms × seeds. kept: a mask
    of the arms to use, repeats × arms.
    """
    count = kept.sum(1)
    means = (x * kept[:, :, None]).sum(1) / count[:, None]
    left = (x - means[:, None]) * kept[:, :, None]
    left -= left.mean(2, keepdims=True)
    df = (count - 1) * (x.shape[2] - 1)
    return (left**2).sum((1, 2)) / df, df, means


def pool(x: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return the pooled standard deviation of a difference of two arms, its degrees of freedom, and the pooled arms.

    An arm is not pooled if an F test says that its variance is larger than that of the other arms. x: repeats × arms ×
    seeds. The first two results have one number for each repeat; the third is a mask, repeats × arms.
    """
    repeats, arms, seeds = x.shape
    kept = np.ones((repeats, arms), bool)
    for _ in range(arms - 2):
        p = np.ones((repeats, arms))
        for arm in range(arms):
            others = kept.copy()
            others[:, arm] = False
            variance, df, means = residual(x, others)
            ratio = (x[:, arm] - means).var(1, ddof=1) / (variance * (1 + 1 / others.sum(1)))
            p[:, arm] = np.where(kept[:, arm] & (kept.sum(1) > 2), special.fdtrc(seeds - 1, df, ratio), 1)
        worst = p.argmin(1)
        out = p[np.arange(repeats), worst] < ALPHA / kept.sum(1)
        if not out.any():
            break
        kept[np.flatnonzero(out), worst[out]] = False
    variance, df, _ = residual(x, kept)
    return np.sqrt(2 * variance), df, kept


def rates(arms: int, seeds: int, factor: float, effect: float = 0.0) -> tuple[float, ...]:
    """Return, for each of three tests, the shares of comparisons that are significant at ALPHA (5 %) and at ALPHA / 10.

    A comparison is of two arms. Each test uses another standard deviation of the difference between the two arms:
    1. the pooled standard deviation;
    2. by fewbits' rule, CAUTION · (pooled standard deviation) or, if it is larger, the standard deviation of test 3;
    3. the standard deviation from these two arms alone.
    If one of the two arms is not pooled, all tests use the standard deviation of test 3. factor: the first arm's
    standard deviation divided by that of the others. effect: the true difference, in standard deviations of a
    difference.
    """
    generator = np.random.default_rng(arms * 100 + seeds)
    x = generator.standard_normal((REPEATS, arms, seeds))
    x[:, 0] = x[:, 0] * factor + effect * np.sqrt(2)
    spread, df, kept = pool(x)
    pairs = x[:, 0] - x[:, 1]
    t, own = pairs.mean(1) * np.sqrt(seeds), pairs.std(1, ddof=1)
    there = kept[:, 0] & kept[:, 1]
    by_pair = t_tail(t / own, seeds - 1.0)
    always = np.where(there, t_tail(t / spread, df), by_pair)
    wide = CAUTION * spread
    rule = np.where(there & (own <= wide), t_tail(t / wide, df), by_pair)
    return tuple(float((p < level).mean()) for p in (always, rule, by_pair) for level in (ALPHA, ALPHA / 10))


def main() -> None:
    heads = ("always 5 %", "0.5 %", "rule 5 %", "0.5 %", "pair 5 %", "0.5 %")
    print(f"{'':34}{''.join(f'{head:>11}' for head in heads)}")
    for arms in (6, 10, 14):
        for seeds in (3, 4, 6):
            for factor in (1.0, 1.5, 2.0, 3.0):
                rates_shown = "".join(f"{100 * share:10.1f} " for share in rates(arms, seeds, factor))
                print(f"{arms:2} arms, {seeds} seeds, spread x{factor:<3}       {rates_shown}")
            rates_shown = "".join(f"{100 * share:10.1f} " for share in rates(arms, seeds, 1.0, effect=2.0))
            print(f"{arms:2} arms, {seeds} seeds, a true effect  {rates_shown}")


if __name__ == "__main__":
    main()
