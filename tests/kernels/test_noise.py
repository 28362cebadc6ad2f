"""Test noise on weights: its distribution, its repeatability, the sampled weight and both of its gradients."""

from __future__ import annotations

import math
from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor

from fewbits import gaussian_noise, sample_weight, uniform_noise, unpack_noise
from fewbits.kernels.backends import build, reference
from fewbits.kernels.backends import cpu as cpu_module
from fewbits.kernels.backends.cpu import BACKEND as cpu
from tests.kernels.backends.gpu.device_checks import Checks
from tests.kernels.inputs import DTYPES, FINITE, ODD, assert_same, generator, grad_of, make

Noise = Literal["gaussian", "uniform"]
NOISES: tuple[Noise, ...] = ("gaussian", "uniform")
SEEDS = (0, 1, 0xFFFF_FFFF, 1 << 32, (1 << 63) - 1)
COUNTS = (0, 1, 7, 8, 9, 127, 128, 129, 2048 * 8, 2048 * 8 + 1, 40_001)
ON_CPU = Checks(cpu, lambda t: t)
needs_compiler = pytest.mark.skipif(not build.available(), reason="there is no C++ compiler, hence no cpu backend")


def noise_of(shape: tuple[int, int], seed: int, noise: Noise) -> Tensor:
    """Return the noise R of a weight of this shape, as float64."""
    count = shape[0] * shape[1]
    r = unpack_noise(gaussian_noise(count, seed), count) if noise == "gaussian" else uniform_noise(count, seed)
    return r.double().view(shape)


def per_element(grid: Tensor, block: int, shape: tuple[int, int]) -> Tensor:
    return grid.repeat_interleave(block, 0)[: shape[0]].repeat_interleave(block, 1)[:, : shape[1]]


def maxima(w: Tensor, block: int) -> Tensor:
    rows = [[b.abs().max() for b in band.split(block, 1)] for band in w.detach().double().split(block)]
    return torch.tensor(rows, dtype=torch.float64)


def composed(w: Tensor, bits: Tensor, r: Tensor, block: int) -> Tensor:
    """Return the sampled weight of GaussWS eq. 3: w + r · max|w| · 2^(1 − bits).

    Each square has one maximum and one bit width. The result is differentiable in w and bits; the maxima count as
    constants (eq. 4).
    """
    scale = maxima(w, block) * torch.exp2(1 - bits)
    return w + r * per_element(scale, block, (w.shape[0], w.shape[1]))


def bits_for(w: Tensor, block: int = 32, low: float = 2, high: float = 9, seed: int = 0) -> Tensor:
    grid = [-(-n // block) for n in w.shape]
    return torch.empty(grid).uniform_(low, high, generator=generator(seed))


# The generators


@needs_compiler
@pytest.mark.parametrize("seed", SEEDS)
def test_reference_and_cpu_draw_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "SMALL", 0)
    for count, threads in product(COUNTS, (1, 2, 3)):
        torch.set_num_threads(threads)
        ON_CPU.noise(count, seed)


@pytest.mark.parametrize("count", COUNTS)
def test_what_is_returned_for_a_count(count: int) -> None:
    words, uniform = gaussian_noise(count, 1), uniform_noise(count, 1)
    assert (words.dtype, words.shape) == (torch.int32, (-(-count // 8),))
    assert (uniform.dtype, uniform.shape) == (torch.bfloat16, (count,))
    values = unpack_noise(words, count)
    assert (values.dtype, values.shape) == (torch.int8, (count,))
    assert_same(unpack_noise(words)[:count], values)
    assert_same(values, unpack_noise(gaussian_noise(count + 100, 1), count))  # an element depends only on its index
    assert_same(uniform, uniform_noise(count + 100, 1)[:count])


@pytest.mark.parametrize("noise", NOISES)
def test_seeds_and_elements_are_independent(noise: Noise) -> None:
    r = noise_of((1, 1 << 20), 1, noise)[0]
    size = math.sqrt(len(r)) * float(r.var())
    for other in (0, 2, 1 + (1 << 32), 1 + (1 << 62)):
        assert abs(float((r * noise_of((1, len(r)), other, noise)[0]).sum())) < 5 * size
    for lag in (1, 2, 4, 7, 8, 9, 16, 32, 64):
        assert abs(float((r[lag:] * r[:-lag]).sum())) < 5 * size


# The sampled weight


@needs_compiler
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_and_cpu_sample_the_same(noise: Noise, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "SMALL", 0)
    for i, (shape, block) in enumerate(product((*ODD, (70, 100), (35, 1091), (0, 5), (5, 0)), (32, 8, 128))):
        w, grad = make(FINITE[i % len(FINITE)], shape, dtype, i), make("normal", shape, DTYPES[i % 3], i)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            ON_CPU.sampled_weight(w, grad, bits_for(w, block, -2, 30), noise, block, DTYPES[(i // 3) % 3])


@needs_compiler
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("columns", [4096, 4099])
def test_a_weight_that_exceeds_the_caches_is_sampled_like_a_small_one(columns: int, noise: Noise) -> None:
    """Check the stores that bypass the caches, for rows that start at a cache line and for others."""
    w = make("normal", (2080, columns), torch.bfloat16, 0)
    bits = bits_for(w, 32, 2, 8)
    got = cpu.sample_weight(w, bits, 3, noise, 32, torch.bfloat16)
    assert got.nbytes > 16 << 20
    assert_same(got[:1024], cpu.sample_weight(w[:1024], bits[:32], 3, noise, 32, torch.bfloat16))


@needs_compiler
def test_reference_and_cpu_scale_noise_alike_to_the_last_bit() -> None:
    """Check that the reference and the CPU backend compute the same bits of 2^(1 − b) for a million bit widths b.

    The noise is multiplied by this factor. The widths reach from overflow to underflow. Many are needed, because 2^x is
    computed by a polynomial, whose errors are rare. The test reads 2^(1 − b) from the gradient of the bit widths, for
    squares of one element: unlike a sampled weight, the gradient is neither added to a weight nor rounded to a dtype.
    """
    ones = torch.ones(1024, 1024)
    bits = torch.empty_like(ones).uniform_(-130, 155, generator=generator(0))
    bits[512:] = bits[512:].round() + bits[512:].frac() / 64 + 0.5  # near the ends of the polynomial's interval
    bits[0, :8] = torch.tensor([-127.0, -128.0, 127.0, 150.0, 151.0, math.inf, -math.inf, math.nan])
    want = reference.sample_weight_backward(ones, ones, bits, 1, "uniform", 1)
    assert_same(cpu.sample_weight_backward(ones, ones, bits, 1, "uniform", 1), want)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("pattern", [0x7FFF_FFFF, -1, 0x7FC0_0000, 0x7F80_0001])
def test_a_weight_that_is_nan_gives_nan_whatever_its_bits(noise: Noise, pattern: int) -> None:
    """Check it for whole vectors and for the rest of a row; conversion to BF16 by an addition would give zeros."""
    w = make("normal", (33, 77))
    w.view(torch.int32)[[0, 32], [40, 76]] = pattern
    nan = sample_weight(w, bits_for(w), 5, noise=noise).isnan()
    expected = torch.zeros(33, 77, dtype=torch.bool)
    expected[:32, 32:64] = expected[32:, 64:] = True
    assert torch.equal(nan, expected)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("shape", [(70, 45), (64, 64), (5, 3), (1, 100)])
def test_gradients_are_those_of_autograd_with_constant_maxima(noise: Noise, shape: tuple[int, int]) -> None:
    """Compare the gradients of the weight and of the bit widths with autograd's for GaussWS eq. 3.

    The gradient of the bit widths is right only if the backward pass draws the same noise as the forward pass.
    """
    w = make("normal", shape).requires_grad_()
    bits = bits_for(w).requires_grad_()
    grad = torch.randn(shape, generator=generator(9))
    sample_weight(w, bits, 11, noise=noise, dtype=torch.float32).backward(grad)

    exact_w, exact_b = w.detach().double().requires_grad_(), bits.detach().double().requires_grad_()
    composed(exact_w, exact_b, noise_of(shape, 11, noise), 32).backward(grad.double())
    assert_same(grad_of(w), grad)
    scale = float(grad_of(exact_b).abs().max())
    torch.testing.assert_close(grad_of(bits).double(), grad_of(exact_b), rtol=1e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("noise", NOISES)
def test_the_seed_alone_decides(noise: Noise) -> None:
    w = make("normal", (64, 64))
    bits = bits_for(w)
    assert_same(sample_weight(w, bits, 5, noise=noise), sample_weight(w, bits, 5, noise=noise))
    assert not torch.equal(sample_weight(w, bits, 5, noise=noise), sample_weight(w, bits, 6, noise=noise))
    assert_same(
        sample_weight(w.t(), bits.t(), 5, noise=noise),
        sample_weight(w.t().contiguous(), bits.t().contiguous(), 5, noise=noise),
    )


def test_a_square_of_zeros_gets_no_noise() -> None:
    w = torch.randn(64, 64)
    w[:32, 32:] = 0
    assert not sample_weight(w, torch.full((2, 2), 3.0), 1)[:32, 32:].any()
