"""Rank correlations of few points, with p by permutation: over all orders where these are few, else over a sample."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from fewbits.analysis.engine.statistics import Array, Side, checked

ALL_ORDERS = 8  # points, up to which each of the n! orders is looked at
SAMPLED = 9_999


class Kind(StrEnum):
    SPEARMAN = "spearman"
    KENDALL = "kendall"  # tau-b


@dataclass(frozen=True)
class Correlation:
    kind: Kind
    n: int
    value: float | None  # None where one of the two does not vary
    p: float | None
    exact: bool  # over all orders


def rank_correlation(
    x: ArrayLike, y: ArrayLike, kind: Kind = Kind.SPEARMAN, side: Side = Side.BOTH, seed: int = 0
) -> Correlation:
    """How far y grows with x, and how often it would in a random order. Three points cannot reach p = 0.05."""
    a, b = checked(x, "x", 3), checked(y, "y", 3)
    if a.size != b.size:
        raise ValueError(f"{a.size} values of x and {b.size} of y: they do not pair")
    exact = a.size <= ALL_ORDERS
    if not np.ptp(a) or not np.ptp(b):
        return Correlation(kind, a.size, None, None, exact)
    features = {Kind.SPEARMAN: _ranks, Kind.KENDALL: _signs}[kind]
    orders = _orders(a.size, exact, seed)
    left, right = features(a[None]), features(b[orders])  # the first order is the given one
    found = right @ left[0] / math.sqrt(float((left[0] ** 2).sum() * (right[0] ** 2).sum()))
    beyond = {Side.ABOVE: found, Side.BELOW: -found, Side.BOTH: np.abs(found)}[side]
    p = float((beyond >= beyond[0] - 1e-9).mean())
    return Correlation(kind, a.size, float(found[0]), p, exact)


def _ranks(rows: Array) -> Array:
    """Centred ranks, ties shared: their correlation is Spearman's."""
    ranks = stats.rankdata(rows, axis=1)
    return np.asarray(ranks - ranks.mean(1, keepdims=True))


def _signs(rows: Array) -> Array:
    """Of all pairs' differences: their correlation is Kendall's tau-b."""
    i, j = np.triu_indices(rows.shape[1], 1)
    return np.sign(rows[:, i] - rows[:, j])


def _orders(n: int, exact: bool, seed: int) -> np.ndarray:
    if exact:
        return np.array(list(itertools.permutations(range(n))))
    generator = np.random.default_rng(seed)
    sampled = generator.permuted(np.tile(np.arange(n), (SAMPLED, 1)), axis=1)
    return np.vstack([np.arange(n), sampled])
