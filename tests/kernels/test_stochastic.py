"""Check that stochastic rounding is fair and repeatable, by z-tests through the public functions.

Seeds are fixed, so results do not change between runs. The bounds are five standard deviations: a correct generator is
within them at almost any seed.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fewbits import Format, encode, fake_quantize
from tests.kernels.inputs import DTYPES, assert_same, make

SIGMAS = 5.0
MANY = 1 << 20


def z_of_share(hits: int, count: int, share: float) -> float:
    return (hits - count * share) / math.sqrt(count * share * (1 - share))


@pytest.mark.parametrize(
    ("name", "low", "step"),
    [
        ("e4m3", 0.0, 2.0**-9),
        ("e4m3", 1.0, 0.125),
        ("e4m3", -30.0, 2.0),
        ("e4m3", 416.0, 32.0),
        ("e2m1", 0.0, 0.5),
        ("e2m1", 3.0, 1.0),
        ("e2m1", -6.0, 2.0),
        ("bf16", 1.0, 2.0**-7),
        ("bf16", 1.25 * 2.0**-126, 2.0**-133),
        ("e8m3", -15.0, 1.0),
    ],
)
@pytest.mark.parametrize("share", [0.5, 0.3, 0.99, 2**-4, 2**-8, 2**-13])
def test_the_share_that_goes_up_is_the_distance_covered(name: str, low: float, step: float, share: float) -> None:
    """Check that elements x between grid values low and high become high with probability (x − low) / (high − low)."""
    x = torch.tensor(low + share * step, dtype=torch.float32)
    share = (float(x) - low) / step  # the share for x as rounded to float32
    y = fake_quantize(x.expand(1024, MANY // 1024), f"{name}:stochastic", seed=11)
    high = y == low + step
    assert (high | (y == low)).all()
    assert abs(z_of_share(int(high.sum()), MANY, share)) < SIGMAS


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        *(("e4m3:1x32:e8m0", dtype) for dtype in DTYPES),
        *(("e2m1:1x32:e8m0", dtype) for dtype in DTYPES),
        # These scalings also round the returned value to the dtype, to nearest, which in 16 bits causes a bias.
        ("e4m3:tensor:amax", torch.float32),
        ("e4m3:32x32:gam", torch.float32),
        ("e2m1:1x16:nvfp4", torch.float32),
        ("e2m1:16x16:nvfp4", torch.float32),
    ],
)
def test_the_mean_of_many_roundings_is_the_value(text: str, dtype: torch.dtype) -> None:
    """Check that the mean error, in steps of the grid, is 0 in each tenth of the elements, sorted by magnitude.

    Values that NVFP4 maps beyond 6, because its E4M3 scale was rounded down, are excluded, because they are clipped.
    """
    x, grid, seeds = make("lognormal", (64, 128), dtype, seed=4), Format.parse(text.split(":")[0]), 64
    scaled = x.double() * encode_factor(x, text)
    inside = (scaled.abs() <= grid.max) & (x != 0)
    step = torch.exp2(scaled.abs().log2().floor().clamp(min=grid.emin) - grid.mantissa_bits)
    share = (scaled / step).frac().abs()
    errors = torch.zeros_like(scaled)
    for seed in range(seeds):
        errors += (fake_quantize(x, f"{text}:stochastic", seed=seed).double() - x.double()) * (
            scaled / x.double() / step
        )
    for tenth in scaled[inside].abs().argsort().tensor_split(10):
        variance = seeds * (share * (1 - share))[inside][tenth].sum()
        assert abs(float(errors[inside][tenth].sum() / variance.clamp(min=0.1).sqrt())) < SIGMAS


def encode_factor(x: Tensor, text: str) -> Tensor:
    """Return the factor by which each element is multiplied before rounding, computed from the stored scales."""
    packed = encode(x, text)
    assert packed.scales is not None
    groups = packed.group_scales.double() if packed.group_scales is not None else torch.ones(1).double()
    if "nvfp4" in text:
        factors = 1 / (packed.scales.view(torch.float8_e4m3fn).double() * groups)
    elif "amax" in text:
        factors = packed.scales.double()
    else:
        exponent = packed.scales.double() - 127
        factors = groups * torch.exp2(exponent if "gam" in text else -exponent)
    rows, cols = (-(-n // m) for n, m in zip(x.shape, factors.shape, strict=True))
    return factors.repeat_interleave(rows, 0).repeat_interleave(cols, 1)


@pytest.mark.parametrize(
    "text", ["e4m3:stochastic", "bf16:stochastic", "e4m3:1x16:e8m0:stochastic", "e2m1:1x8:mx:stochastic"]
)
def test_an_elements_draw_is_a_function_of_the_seed_and_its_row_major_index(text: str) -> None:
    """Check that later elements, the axis, the shape and the memory layout do not affect an element's draw."""
    x = make("normal", (96, 160), torch.float32, seed=1)
    y = fake_quantize(x, text, seed=9)
    assert_same(fake_quantize(x, text, seed=9), y)
    assert_same(fake_quantize(x[:31], text, seed=9), y[:31])
    assert_same(fake_quantize(x.view(4, 24, 160), text, seed=9), y.view(4, 24, 160))
    assert_same(fake_quantize(x.t().contiguous().t(), text, seed=9), y)
    assert not torch.equal(fake_quantize(x, text, seed=10), y)
    if ":1x" not in text:
        assert_same(fake_quantize(x, text, seed=9, axis=0), y)
        assert_same(fake_quantize(x.view(-1), text, seed=9), y.view(-1))
