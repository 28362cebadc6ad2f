"""Compare the relative errors of CUDA kernels' statistics with |x − y| / |x|, computed by true divisions.

The kernels multiply by a reciprocal and correct the product. All pairs (x, y) of 16-bit numbers are compared for x in a
few binades; other binades need no check, because scaling both numbers by a power of two keeps the quotient. For
float32, all reciprocals are compared, and the errors of random pairs.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from fewbits.kernels.backends import build
from fewbits.kernels.quantizer import Quantizer
from tests.effort import DEEP
from tests.kernels.backends.gpu.device_checks import Checks
from tests.kernels.backends.gpu.emulated import SIMT, compiled, emulated_device
from tests.kernels.inputs import DTYPES, generator, make

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler for the emulator")


@pytest.fixture(scope="module")
def errors() -> ctypes.CDLL:
    library = compiled(SIMT / "errors.cpp", "-O2")
    for name in ("bf16_pairs", "fp16_pairs", "bf16_zeros", "fp32_reciprocals", "fp32_pairs"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def bits(x: float, dtype: torch.dtype) -> int:
    return int(torch.tensor(x, dtype=dtype).view(torch.int16))


# The binades of the smallest bf16 x whose errors are computed without division, of a usual x, and of the largest x.
@pytest.mark.parametrize("exponent", [-93, 0, 124])
def test_errors_of_all_pairs_of_bf16(errors: ctypes.CDLL, exponent: int) -> None:
    first, last = (bits(2.0**e, torch.bfloat16) for e in (exponent, exponent + 1))
    assert last - first == 128
    assert errors.bf16_pairs(first, last) == 0


@pytest.mark.parametrize("exponent", [-14, 0])
def test_errors_of_all_pairs_of_fp16(errors: ctypes.CDLL, exponent: int) -> None:
    first, last = (bits(2.0**e, torch.float16) for e in (exponent, exponent + 1))
    assert errors.fp16_pairs(first, last) == 0


def test_errors_of_subnormal_fp16(errors: ctypes.CDLL) -> None:
    assert errors.fp16_pairs(1, bits(2.0**-14, torch.float16)) == 0


def test_an_element_that_becomes_zero_has_the_error_one(errors: ctypes.CDLL) -> None:
    assert errors.bf16_zeros() == 0


def test_errors_by_every_reciprocal_of_float32(errors: ctypes.CDLL) -> None:
    exceptions = ctypes.c_int64()
    assert errors.fp32_reciprocals(ctypes.byref(exceptions)) == 0
    assert exceptions.value <= 3, "the theorem applies to all significands but one"


@pytest.mark.parametrize("exponent", [-77, 0, 124])
def test_errors_of_random_pairs_of_float32(errors: ctypes.CDLL, exponent: int) -> None:
    """Compare errors for y in [0, 2 x), for y = x · (1 ± 2^-k), and for y a few units in the last place from x."""
    n, g = 10_000_000 if DEEP else 1_000_000, generator(exponent)
    x = (1 + torch.rand(n, generator=g)) * 2.0**exponent
    scale = 2.0 ** -torch.randint(0, 24, (n,), generator=g)
    near = x.view(torch.int32) + torch.randint(-8, 9, (n,), generator=g, dtype=torch.int32)
    for y in (x * (2 * torch.rand(n, generator=g)), x * (1 + scale), x - x * scale, near.view(torch.float32)):
        assert errors.fp32_pairs(ctypes.c_int64(n), address(x), address(y.contiguous())) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "text", ["e4m3:4x8:amax", "e5m2:1x16:e8m0", "e2m1:1x16:nvfp4:stochastic", "fp16:8x8:mx", "e4m3"]
)
def test_statistics_at_all_exponents_are_those_of_the_reference(text: str, dtype: torch.dtype) -> None:
    """Check matrices of usual numbers, and of tiny or huge numbers, whose errors the kernels compute by a division."""
    q, limit = Quantizer.parse(text), torch.finfo(dtype).max
    checks = Checks(emulated_device()[0], lambda t: t)
    for exponent in (-140, -126, -110, -100, -93, -85, -77, -60, -44, -20, 0, 60, 122, 125, 127):
        x = make("lognormal", (34, 48), torch.float32, seed=exponent + 200).double() * 2.0**exponent
        checks.quantizer(x.clamp(-limit, limit).to(dtype), q, -1, partition=q.block.resolve(x.shape, -1))


def address(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())
