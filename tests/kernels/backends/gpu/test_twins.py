"""Compare the C++ code that replaces GPU instructions in the emulator with torch, for all 16-bit inputs if possible.

The instructions themselves run only on a GPU, where test_cuda_emulated.py quantizes the same bit patterns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fewbits.kernels.backends import build
from fewbits.kernels.backends.constants import flat, grid_of
from fewbits.kernels.quantizer import Quantizer
from tests.kernels.backends.gpu.device_checks import every_pattern
from tests.kernels.backends.gpu.emulated import SIMT, compiled
from tests.kernels.inputs import assert_same, generator

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler for the emulator")
HALVES = {torch.bfloat16: "narrow_bf16", torch.float16: "narrow_fp16"}


@pytest.fixture(scope="module")
def twins() -> ctypes.CDLL:
    return compiled(SIMT / "twins.cpp")


def apply(function: Callable[..., object], inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (*inputs, output)]
    function(inputs[0].numel(), *addresses)
    return output


def test_every_fp16_is_widened_exactly(twins: ctypes.CDLL) -> None:
    every = every_pattern(torch.float16).flatten()
    assert_same(apply(twins.widen_fp16, (every,), torch.empty(every.numel())), every.float())


@pytest.mark.parametrize("dtype", HALVES)
def test_narrowing_rounds_to_the_nearest_even_at_and_around_every_midpoint(
    twins: ctypes.CDLL, dtype: torch.dtype
) -> None:
    """Narrow every 16-bit number, every midpoint of two neighbours, and the FP32 numbers next to the midpoints."""
    pattern = every_pattern(dtype).flatten()
    pattern = pattern[pattern.isfinite()]
    # `following` has the next greater magnitude.
    every, following = pattern.float(), (pattern.view(torch.int16) + 1).view(dtype).float()
    middle = torch.where(following.isfinite(), ((every.double() + following.double()) / 2).float(), every)
    assert int((middle.to(dtype).float() == middle).sum()) == 2, "only the largest numbers have no midpoint"
    near = [(middle.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)]
    x = torch.cat([every, *near])
    x = x[x.isfinite()]
    x = x[: x.numel() // 2 * 2].contiguous()
    two = apply(getattr(twins, HALVES[dtype]), (x,), torch.empty(x.numel() // 2, dtype=torch.int32))
    assert_same(two.view(dtype), x.to(dtype))


def test_the_larger_and_the_smaller_of_two_halves(twins: ctypes.CDLL) -> None:
    """Take maxima and minima of the 16-bit halves of words: each of the 65,536 values of a half with a random value."""
    every = torch.arange(1 << 16, dtype=torch.int64)
    other = every[torch.randperm(1 << 16, generator=generator(0))]
    a, b = ((x << 16 | y).to(torch.uint32) for x, y in ((every, other), (other, every.flip(0))))
    for function, want in ((twins.larger_halves, torch.maximum), (twins.smaller_halves, torch.minimum)):
        got = apply(function, (a, b), torch.empty_like(a)).long()
        assert torch.equal(got >> 16, want(every, other))
        assert torch.equal(got & 0xFFFF, want(other, every.flip(0)))


def test_a_sum_is_rounded_toward_zero(twins: ctypes.CDLL) -> None:
    """Compare with sums in float64, which are exact if the exponents of the FP32 numbers differ by less than 29."""
    g = generator(1)
    a, b = (torch.randn(1 << 16, generator=g) * 2.0 ** torch.randint(0, 20, (1 << 16,), generator=g) for _ in range(2))
    exact, got = a.double() + b.double(), apply(twins.add_toward_zero, (a, b), torch.empty_like(a))
    following = (got.view(torch.int32) + 1).view(torch.float32)  # has the next greater magnitude
    assert bool(((got.double().abs() <= exact.abs()) & (following.double().abs() > exact.abs())).all())


def test_products_of_64_bits_give_the_same_random_bits(twins: ctypes.CDLL) -> None:
    index, seed = (torch.randint(-(2**63), 2**63 - 1, (10_000,), generator=generator(i)) for i in range(2))
    assert not apply(twins.different_draws, (index, seed), torch.ones(10_000, dtype=torch.uint8)).any()


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2", "e3m2", "e1m1", "e4m7", "fp16"])
def test_stochastic_rounding_without_conversion_gives_the_same_bits(twins: ctypes.CDLL, name: str) -> None:
    """Round all bf16 and fp16 magnitudes, and random FP32 ones, that are below four times the format's maximum."""
    q = Quantizer.parse(f"{name}:stochastic")
    grid, most = ctypes.c_uint32 * 6, 4 * q.format.max
    words = grid(*flat(grid_of(q.format, q.overflow)))
    scaled = most * torch.rand(1 << 18, generator=generator(2)) ** 4
    tiny = scaled * 2.0 ** -torch.randint(0, 120, scaled.shape, generator=generator(3))
    v = torch.cat([every_pattern(d).flatten().float() for d in HALVES] + [scaled, tiny]).abs()
    v = v[v < most].contiguous()
    different = torch.ones(v.numel(), dtype=torch.uint8)
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (v, different)]
    twins.different_roundings(v.numel(), addresses[0], ctypes.byref(words), addresses[1])
    assert not different.any()
