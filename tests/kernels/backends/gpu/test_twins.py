"""Compare the plain twins of GPU instructions with torch: where there are 65,536 cases, all of them.

The instructions themselves run on a GPU only, where test_cuda.py quantizes the same patterns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fewbits.kernels.backends import build
from fewbits.kernels.quantizer import Quantizer
from tests.kernels.backends.gpu.device_checks import CONVERTED, Checks, every_pattern
from tests.kernels.backends.gpu.emulated import SIMT, compiled, emulated_device
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
    """Narrow every number, every midpoint of neighbours, and the FP32 numbers next to the midpoints."""
    pattern = every_pattern(dtype).flatten()
    pattern = pattern[pattern.isfinite()]
    every, following = pattern.float(), (pattern.view(torch.int16) + 1).view(dtype).float()  # of greater magnitude
    middle = torch.where(following.isfinite(), ((every.double() + following.double()) / 2).float(), every)
    assert int((middle.to(dtype).float() == middle).sum()) == 2, "only the largest numbers have no midpoint"
    near = [(middle.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)]
    x = torch.cat([every, *near])
    x = x[x.isfinite()]
    x = x[: x.numel() // 2 * 2].contiguous()
    two = apply(getattr(twins, HALVES[dtype]), (x,), torch.empty(x.numel() // 2, dtype=torch.int32))
    assert_same(two.view(dtype), x.to(dtype))


def test_the_larger_of_two_halves(twins: ctypes.CDLL) -> None:
    """Compare all 65,536 values of one half with random values; the other half must not matter."""
    every = torch.arange(1 << 16, dtype=torch.int64)
    other = every[torch.randperm(1 << 16, generator=generator(0))]
    a, b = ((x << 16 | y).to(torch.uint32) for x, y in ((every, other), (other, every.flip(0))))
    got = apply(twins.larger_halves, (a, b), torch.empty_like(a)).long()
    assert torch.equal(got >> 16, torch.maximum(every, other))
    assert torch.equal(got & 0xFFFF, torch.maximum(other, every.flip(0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("text", CONVERTED)
def test_every_pattern_is_converted_as_the_reference_does(text: str, dtype: torch.dtype) -> None:
    Checks(emulated_device()[0], lambda t: t).quantizer(every_pattern(dtype), Quantizer.parse(text), -1)
