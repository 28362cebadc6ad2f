"""Check a stream of stochastic rounding: bias, correlations, and random numbers that repeat.

The function under test rounds one fixed matrix at several steps on two ranks. In every block the first element is the
largest, so all scales are equal, and each other element has two neighbours, one above and one below. The results are
right if they are these neighbours, each with the probability that makes the mean exact, independently of everything
else. Each check is a number of standard errors; with a right function one of them is above the limit once in about
10,000 runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.kernels.conformance import one_line, plain

Rounding = Callable[[Tensor, int, int], Tensor]
ROWS, COLS, STEPS, OTHER_RANKS = 64, 512, 32, 4
LIMIT = 5.0


@dataclass(frozen=True)
class Check:
    """One check: the number that was measured, and whether it is within its limit."""

    name: str
    measured: float
    passed: bool
    about: str


def check_randomness(function: Rounding, *, seed: int = 0) -> list[Check]:
    """Return the checks of a function (x, step, rank) → values of x's shape, rounded stochastically.

    ValueError if the results have a wrong shape or only one value for each element, that is, are not random.
    """
    x = _matrix(seed)
    draws = torch.stack([_values(function, x, step, 0) for step in range(STEPS)])
    others = torch.stack([_values(function, x, step, 1) for step in range(OTHER_RANKS)])
    if bool((draws == draws[0]).all()) and bool((others == draws[0]).all()):
        raise ValueError(
            "all steps and ranks give the same values: the function does not round stochastically, or ignores both"
        )
    grid = torch.cat([draws.flatten(), others.flatten()])
    grid = grid[grid.isfinite()].unique()
    if len(grid) < 2:
        raise ValueError("the function returned fewer than two different finite values: there is nothing to check")
    above = torch.searchsorted(grid, x).clamp(1, len(grid) - 1)
    low, high = grid[above - 1].double(), grid[above].double()
    exact = x.double()
    used = (exact > low) & (exact < high)
    used &= x.abs() > x.abs().max() / 64  # the results show all neighbours of these, up to 8 bits of mantissa
    share = (exact - low) / (high - low)
    strange = torch.cat([draws, others]).double()
    errors = (strange == high).double() - share  # of both ranks
    strange = (used & (strange != low) & (strange != high)) | ((exact == high) & (strange != high))
    between = float(used.double().mean())
    spread = (share * (1 - share)).clamp(min=1e-12).sqrt()
    checks = [
        Check("neighbours", float(strange.sum()), not bool(strange.any()), "results that are no neighbour of x"),
        Check("between neighbours", between, between > 0.5, "share of elements that can be checked, at least 0.5"),
        _z("bias", *_total(errors, spread, used), "mean of results minus x"),
        _z(
            "bias away from zero",
            *_total(errors * exact.sign(), spread, used),
            "the same, by sign of x",
        ),
    ]
    for least, most in itertools.pairwise((0, 0.02, 0.1, 0.4, 0.6, 0.9, 0.98, 1)):
        part = used & (share >= least) & (share < most)
        total = _total(errors, spread, part)
        checks.append(_z(f"bias at {least:g} to {most:g}", *total, "between the neighbours, of the way up"))
    moderate = used & (share > 0.1) & (share < 0.9)  # whose u is at most 3, so sums of a few thousand are normal
    stream = torch.where(moderate, errors[:STEPS] / spread, 0)
    other = torch.where(moderate, errors[STEPS:] / spread, 0)
    checks += [
        _correlation("stream", stream, stream, moderate),
        _correlation("stream of rank 1", other, other, moderate),
        _correlation("ranks", stream, other, moderate),
    ]
    return checks


def _matrix(seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(ROWS, COLS, generator=g) * torch.exp2(-4 * torch.rand(ROWS, COLS, generator=g)) * 448
    x = x * (torch.randint(0, 2, x.shape, generator=g) * 2 - 1)
    x[:, ::16] = 448.0
    return x


def _values(function: Rounding, x: Tensor, step: int, rank: int) -> Tensor:
    try:
        returned = function(x.clone(), step, rank)
    except Exception as error:
        raise ValueError(f"the function raised an error at step {step}, rank {rank}: {one_line(error)}") from error
    values = plain(returned, "values")
    if values.shape != x.shape:
        shapes = f"{list(x.shape)}, not {list(values.shape)}"
        raise ValueError(f"the function must return a tensor of values of shape {shapes}")
    return values.float()


def _total(errors: Tensor, spread: Tensor, used: Tensor) -> tuple[float, float]:
    """Return the sum of errors over all steps, and its standard deviation if the rounding is right."""
    return float(torch.where(used, errors, 0).sum()), math.sqrt(len(errors) * float(spread[used].square().sum()))


def _z(name: str, total: float, deviation: float, about: str) -> Check:
    z = total / deviation if deviation else 0.0
    return Check(name, z, abs(z) < LIMIT, f"{about}, in standard errors")


def _correlation(name: str, a: Tensor, b: Tensor, used: Tensor) -> Check:
    """Correlate two streams of draws at all distances, by FFT, and return the strongest correlation."""
    size = 2 * a.numel()
    pairs = _products(used.expand(a.shape).double(), used.expand(b.shape).double(), size).round()
    z = torch.where(pairs > 4000, _products(a, b, size) / pairs.clamp(min=1).sqrt(), 0)
    if a is b:
        z[0] = 0
    most = float(z.abs().max())
    at = int((z.abs() >= 0.4 * most).nonzero()[0])  # a period, not its multiples, which correlate up to twice as much
    steps, rest = divmod(min(at, size - at), used.numel())
    apart = f"{steps} steps, {rest // COLS} rows and {rest % COLS} columns apart"
    text = f"of rounding directions, the strongest of all distances (first {apart}), in standard errors"
    return Check(f"correlation, {name}", most, most < LIMIT + 2, text)


def _products(a: Tensor, b: Tensor, size: int) -> Tensor:
    """Return for each distance the sum of products of the elements of a and b that are so far apart."""
    return torch.fft.irfft(torch.fft.rfft(a.flatten(), size).conj() * torch.fft.rfft(b.flatten(), size), size)
