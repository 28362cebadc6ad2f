"""Compare errors of quantizers on known distributions with values computed independently or derived from theory.

A quantizer can agree with our other code and be wrong, but then its mean squared error on N(0, 1) is unlikely to be
right. A tolerance is a number of standard errors of the sample, estimated from bands of rows, plus half a unit of the
last printed digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from fewbits import fake_quantize
from tests.kernels.inputs import generator

SHAPE = (2048, 4096)
SIGMAS = 4


def normal(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=generator(seed))


def laplace(seed: int = 0) -> Tensor:
    u = torch.rand(SHAPE, generator=generator(seed), dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs())).float()


def student(degrees: int, shape: tuple[int, int] = SHAPE, seed: int = 0) -> Tensor:
    g = generator(seed)
    chi_square = sum((torch.randn(shape, generator=g).square() for _ in range(degrees)), torch.zeros(()))
    return torch.randn(shape, generator=g) / (chi_square / degrees).sqrt()


@cache
def sample(name: str) -> Tensor:
    draw: dict[str, Callable[[], Tensor]] = {"normal": normal, "laplace": laplace, "t4": lambda: student(4)}
    return draw[name]()


def ratio(numerator: Tensor, denominator: Tensor) -> tuple[float, float]:
    """Return Σ numerator / Σ denominator, and its standard error; bands of 16 rows count as independent samples."""
    a, b = (t.double().view(-1, 16 * t.shape[-1]).sum(1) for t in (numerator, denominator))
    r = float(a.sum() / b.sum())
    return r, float((a - r * b).std() / b.mean() / math.sqrt(len(a)))


# Relative mean squared error, E(x − x̂)² / E x², 2048 × 4096 independent values
# fmt: off
TABLE = [
    # quantizer                     N(0, 1)  Laplace  t(4)
    ("e2m1:1x16:nvfp4",             .00905,  .00859,  .00844),
    ("e2m1:16x16:nvfp4",            .01240,  .01675,  .02278),
    ("e2m1:1x16:nvfp4:stochastic",  .01886,  .01827,  .01808),
    ("e2m1:1x32:nvfp4",             .01033,  .01070,  .01087),
    ("e2m1:1x32:e8m0",              .01332,  .01745,  .01942),
    ("e2m1:1x32:mx",                .01322,  .01604,  .01724),
    ("e2m1:1x16:e8m0",              .01272,  .01516,  .01591),
    ("e2m1:1x32:e8m0:stochastic",   .02710,  .03549,  .03942),
]
# fmt: on


DISTRIBUTIONS = ("normal", "laplace", "t4")


@pytest.mark.parametrize(
    ("row", "name"),
    [
        # Without FEWBITS_TESTS=deep, each quantizer is checked with one distribution.
        pytest.param(row, name, marks=() if at % 3 == DISTRIBUTIONS.index(name) else pytest.mark.deep)
        for at, row in enumerate(TABLE)
        for name in DISTRIBUTIONS
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_relative_mean_squared_errors(row: tuple[str, float, float, float], name: str) -> None:
    text, *golden = row
    x = sample(name)
    measured, error = ratio((x - fake_quantize(x, text, seed=1)).square(), x.square())
    expected = golden[DISTRIBUTIONS.index(name)]
    # Both values have sampling errors: the expected value comes from another sample of the same size.
    assert measured == pytest.approx(expected, abs=SIGMAS * math.sqrt(2) * error + 5e-6)
    assert error < 0.01 * measured  # a larger error would make the comparison above meaningless


# Relative error, mean of |x − x̂| / |x|


def relative_error(mantissa_bits: int) -> tuple[float, float]:
    """Return the mean relative error of nearest rounding in a binade: for log-uniform and for uniform mantissas.

    The integrals are computed exactly.
    """
    steps = 2**mantissa_bits
    log_uniform = uniform = 0.0
    for i in range(steps + 1):
        near, half = 1 + i / steps, 0.5 / steps
        for far in [near + half] * (i < steps) + [near - half] * (i > 0):
            log_uniform += abs(math.log(far / near) + near / far - 1)
            uniform += abs(half - near * abs(math.log(far / near)))
    return log_uniform / math.log(2), uniform


@pytest.mark.parametrize(("name", "low", "high", "mantissa_bits"), [("e4m3", -6, 8, 3), ("e5m2", -14, 15, 2)])
def test_relative_error_of_values_within_range(name: str, low: int, high: int, mantissa_bits: int) -> None:
    g, count = generator(0), (512, 4096)
    exponent = torch.randint(low, high, count, generator=g, dtype=torch.float64)
    fraction = torch.rand(count, generator=g, dtype=torch.float64)
    inputs = torch.exp2(exponent + fraction), torch.exp2(exponent) * (1 + fraction)
    for x, expected in zip(inputs, relative_error(mantissa_bits), strict=True):
        values, stats = fake_quantize(x.float(), name, stats=True)
        spread = float(((values.double() - x).abs() / x).std())
        assert float(stats.error) == pytest.approx(expected, abs=SIGMAS * spread / math.sqrt(x.numel()))


@pytest.mark.parametrize("name", ["normal", "laplace"])
@pytest.mark.parametrize("block", ["tensor", "channel", "128x128", "64x64", "1x128"])
def test_light_tails_give_the_same_error_under_every_partition(name: str, block: str) -> None:
    """Check that the mean relative error of normal and Laplace values is 2.25 % with every block.

    This is half of MoR's threshold, so such tensors never fall back to BF16.
    """
    _, stats = fake_quantize(sample(name)[:512].contiguous(), f"e4m3:{block}:gam", stats=True)
    assert float(stats.error) == pytest.approx(0.0225, abs=3e-4)


@pytest.mark.parametrize(
    ("name", "golden"),
    [("lognormal", (0.040, 0.031, 0.026, 0.023)), ("squared relu", (0.073, 0.054, 0.042, 0.032))],
)
def test_heavy_tails_are_why_partitions_matter(name: str, golden: tuple[float, ...]) -> None:
    """Check that the error falls with the size of blocks: tensor, 128x128, 64x64, channel of 1024 values, 1x128.

    The data are lognormal (σ = 2), or the squared ReLU of t(3). `golden` has the expected errors of all blocks but
    `tensor`. The error of `tensor` depends on a single value, the largest; so the test checks only that this error is
    more than twice that of 128x128.
    """
    shape = (2048, 1024)
    lognormal = (2 * torch.randn(shape, generator=generator(0))).exp()
    x = lognormal if name == "lognormal" else student(3, shape).relu().square()
    tensor, *parts = (
        float(fake_quantize(x, f"e4m3:{block}:amax", stats=True)[1].error)
        for block in ("tensor", "128x128", "64x64", "channel", "1x128")
    )
    assert parts == pytest.approx(golden, rel=0.04)
    assert [tensor, *parts] == sorted([tensor, *parts], reverse=True)
    assert tensor > 2 * parts[0]
