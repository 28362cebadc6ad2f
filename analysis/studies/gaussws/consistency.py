"""Compute with the kernels what three claims about GaussWS state: G5 (transpose), G6 (gradients) and G17 (memory).

G5: is a weight quantized like its transpose? G6: do noise and gradients of the backward pass agree with the forward
pass? G17: how many bytes do the sampled weight and the noise take for each element of a weight?
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.studies.gaussws.theory import SQUARE, noise
from fewbits.experiments.bench.train import Step
from fewbits.experiments.config import load_recipe
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.noise import gaussian_noise, sample_weight, uniform_noise
from fewbits.models.networks.registry import linear_parameters, model

KINDS = {"gaussws": "gaussian", "diffq": "uniform"}
INT4 = "e1m2"  # with one exponent bit the grid is uniform: 0, ±1 … ±7 steps
SHAPE = (3 * SQUARE + 5, 2 * SQUARE + 9)  # not a multiple of the squares' side, so squares at two edges are smaller
GIB = 2**30


def weights(seed: int = 0, shape: tuple[int, int] = SHAPE) -> Tensor:
    """Return a matrix of random FP32 values from the standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------- G5: blocks and the transpose


def parted(w: Tensor, block: str, grid: str = INT4) -> int:
    """Return the number of elements in which Q(w) and Q(wᵀ)ᵀ differ.

    Q quantizes to the format `grid` in blocks of the shape `block`, for example 1x32.
    """
    there = fake_quantize(w, f"{grid}:{block}:amax")
    back = fake_quantize(w.T.contiguous(), f"{grid}:{block}:amax").T
    return int((there != back).sum())


# -------------------------------------------------------------------------------- G6: gradients


@dataclass(frozen=True)
class Gradients:
    """The kernel's gradients compared with automatic differentiation in float64."""

    squares: int  # the number of blocks of 32×32 weights, each of which has a bit width
    # The greatest |∂L/∂b of the kernel − ∂L/∂b in float64| / (ln 2 · s · Σ|g·R|). The divisor is the largest possible
    # |∂L/∂b|: s is the factor of the noise, g the gradient of ŵ, and Σ is over the weights of the square.
    bits: float
    weights: float  # the greatest difference between ∂L/∂w and ∂L/∂ŵ
    redrawn: bool  # whether the backward pass uses the same R as the forward pass


def gradients(kind: str, seed: int = 5) -> Gradients:
    """Compare the kernel's gradients of weights and bit widths with those that torch computes in float64 from eq. 3.

    Eq. 3 of the paper defines the sampled weight ŵ, a weight plus noise. The weights and the gradients of ŵ are random.
    kind: gaussian or uniform noise.
    """
    w = weights(seed).requires_grad_()
    grid = tuple(-(-n // SQUARE) for n in SHAPE)
    widths = torch.linspace(3, 9, math.prod(grid)).view(grid).requires_grad_()
    upstream = weights(seed + 1)
    out = _sampled(w, widths, seed, kind)
    out.backward(upstream)
    assert w.grad is not None
    assert widths.grad is not None

    r = noise(kind, w.numel(), seed).double().view(SHAPE)
    exact_bits = widths.detach().double().requires_grad_()
    largest = _spread(_maxima(w.detach()))  # a constant, as in eq. 4
    ((w.detach().double() + r * largest * torch.exp2(1 - _spread(exact_bits))) * upstream.double()).sum().backward()
    assert exact_bits.grad is not None
    scale = _maxima(w.detach()) * torch.exp2(1 - widths.detach().double())
    size = math.log(2) * scale * _by_square((upstream * r).abs(), torch.sum)
    return Gradients(
        math.prod(grid),
        float(((widths.grad - exact_bits.grad).abs() / size).max()),
        float((w.grad - upstream).abs().max()),
        _redrawn(w.detach(), widths.detach(), seed, kind),
    )


def _redrawn(w: Tensor, widths: Tensor, seed: int, kind: str) -> bool:
    """Tell whether the forward and the backward pass use the same noise R in five tested elements of each square.

    A square is a block of 32×32 weights, which has one bit width. The elements are on the square's diagonal. If the
    gradient of ŵ is 1 in one element of a square and 0 elsewhere, the gradient of the square's bit width is
    proportional to the R of this element.

    widths: the bit width of each square. seed: the seed of the noise. kind: gaussian or uniform noise.
    """
    forward = noise(kind, w.numel(), seed).view(SHAPE)
    scale = _maxima(w) * torch.exp2(1 - widths.double())
    for place in range(5):  # the squares at the lower edge have only 5 rows
        asked = torch.zeros(SHAPE)
        asked[place::SQUARE, place::SQUARE] = 1
        bits = widths.clone().requires_grad_()
        _sampled(w, bits, seed, kind).backward(asked)
        assert bits.grad is not None
        drawn = -bits.grad.double() / (math.log(2) * scale)
        if not torch.allclose(drawn, forward[place::SQUARE, place::SQUARE].double(), rtol=1e-5, atol=1e-6):
            return False
    return True


def _sampled(w: Tensor, widths: Tensor, seed: int, kind: str) -> Tensor:
    gaussian = kind == "gaussian"
    return sample_weight(w, widths, seed, noise="gaussian" if gaussian else "uniform", dtype=torch.float32)


def _spread(grid: Tensor) -> Tensor:
    """Return a matrix of SHAPE in which every element has the value of its square, a block of 32×32 elements.

    grid: a value for each square.
    """
    return grid.repeat_interleave(SQUARE, 0)[: SHAPE[0]].repeat_interleave(SQUARE, 1)[:, : SHAPE[1]]


def _by_square(x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the result of `reduce` for each block of SQUARE x SQUARE elements; those at an edge may be smaller."""
    return torch.stack([torch.stack([reduce(part) for part in band.split(SQUARE, 1)]) for band in x.split(SQUARE)])


def _maxima(w: Tensor) -> Tensor:
    return _by_square(w.double().abs(), torch.max)


# -------------------------------------------------------------------------------- G17: bytes


@dataclass(frozen=True)
class Bytes:
    """The bytes that tensors take for each element of a weight."""

    sampled: float  # bytes of the sampled weight ŵ
    noise: dict[str, float]  # by method (gaussws, diffq), bytes of the generated noise R
    widths: float  # bytes of the bit widths in float32


def bytes_each(shape: tuple[int, int] = (1024, 1024)) -> Bytes:
    """Return how many bytes the sampled weight, noise and bit widths take per element of a weight of this shape."""
    w, count = torch.zeros(shape), math.prod(shape)
    widths = torch.full((shape[0] // SQUARE, shape[1] // SQUARE), 6.0)
    return Bytes(
        sample_weight(w, widths, 0).nbytes / count,
        {"gaussws": gaussian_noise(count, 0).nbytes / count, "diffq": uniform_noise(count, 0).nbytes / count},
        widths.nbytes / count,
    )


def added(name: str, recipe: str, batch: int, length: int) -> float:
    """Return the bytes that a recipe adds to the peak memory of a training step, per sampled parameter.

    Memory is the total size of all tensors. name: the preset of the model, which is trained with only one Transformer
    block. batch: the number of sequences. length: the number of tokens in a sequence.
    """
    config = replace(model(name), layers=1)
    text = torch.zeros(batch, length + 1, dtype=torch.long)
    peaks = []
    for used in (load_recipe(recipe), None):
        step = Step(config, used, "adamw", text)
        step()
        peaks.append(step.memory())
    return (peaks[0] - peaks[1]) / linear_parameters(config)


def papers_bytes() -> dict[str, float]:
    """Return the bytes per sampled parameter that GaussWS adds with AdamW in the paper's Table 1, by size of model."""
    models = {"134m": "llama2-134m", "1b": "llama2-1b", "3b": "llama2-3b", "70b": "llama2-70b-4l"}
    printed = paper("gaussws").table("Table 1")
    found = {}
    for row, name in models.items():
        plain, ours = (printed.value(f"memory-{row}", column) for column in ("adamw", "adamw-gaussws"))
        assert plain is not None
        assert ours is not None
        found[row] = (ours - plain) * GIB / linear_parameters(model(name))
    return found
