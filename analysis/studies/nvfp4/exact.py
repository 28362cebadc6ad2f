"""What is true of NVFP4 by construction, asked of our own kernels whenever a report is made (N12, N24, N25).

And two findings of our own about the same kernels: that stochastic rounding is biased where a block's scale was rounded
down (S1), and that the Hadamard transform raises the squared error of tensors with outliers (S2). Values are normal,
from a fixed seed, unless another tensor is said; what is drawn is averaged over so many values that its own error is
far below what is said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from fewbits.analysis.engine.data import Exact
from fewbits.analysis.engine.hooks import exact
from fewbits.analysis.engine.paper import paper
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.packed import encode
from fewbits.kernels.quantizer import HADAMARD_SIZES, Quantizer
from fewbits.kernels.reference.elements import values_of
from fewbits.kernels.reference.rotation import hadamard, hadamard_signs, rotate

NVFP4, MXFP4 = "e2m1:1x16:nvfp4", "e2m1:1x32:e8m0"
SIDE = 1024
SPACING = 2.0**-24  # what FP32 itself rounds by
E4M3_HALF_STEP = 2.0**-4  # the most that E4M3's nearest rounding moves a normal number, relative to it


@cache
def normal(seed: int = 0) -> Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def squared_error(x: Tensor, y: Tensor) -> float:
    """Relative to the mean square of x."""
    return float((x.double() - y.double()).square().sum() / x.double().square().sum())


# -------------------------------------------------------------------------------- N12


@cache
def rounding_errors(spec: str) -> tuple[float, float]:
    """The relative squared error to nearest, and stochastically."""
    x = normal()
    return squared_error(x, fake_quantize(x, spec)), squared_error(x, fake_quantize(x, f"{spec}:stochastic", seed=1))


@exact("nvfp4", "N12")
def n12() -> Exact:
    found = {name: rounding_errors(spec) for name, spec in (("NVFP4", NVFP4), ("MXFP4", MXFP4))}
    words = (
        f"{name} {stochastic:.4f} beside {nearest:.4f}, {stochastic / nearest:.2f} times"
        for name, (nearest, stochastic) in found.items()
    )
    holds = all(stochastic > nearest for nearest, stochastic in found.values())
    return Exact(holds, f"relative squared error on normal values, stochastic beside nearest: {'; '.join(words)}")


# -------------------------------------------------------------------------------- N24


@dataclass(frozen=True)
class Maxima:
    """How block maxima come back."""

    share: float  # of all values
    mean: float  # relative error
    most: float


@cache
def maxima(spec: str) -> Maxima:
    """Of normal values, and of blocks whose greatest magnitude is each of BF16's 128 mantissas."""
    size = _cols(spec)
    mantissas = 1 + torch.arange(128.0) / 128
    every = torch.ones(128, 1) * 0.01 * mantissas[:, None] * torch.ones(1, size)
    every[:, 0] = mantissas
    found = [_errors_at_maxima(x, fake_quantize(x, spec), size) for x in (normal(), every)]
    errors = torch.cat(found)
    return Maxima(1 / size, float(found[0].mean()), float(errors.max()))


def _cols(spec: str) -> int:
    cols = Quantizer.parse(spec).block.cols
    assert cols is not None
    return cols


def _errors_at_maxima(x: Tensor, y: Tensor, size: int) -> Tensor:
    blocks, back = x.reshape(-1, size), y.reshape(-1, size)
    place = blocks.abs().argmax(1, keepdim=True)
    return (back.gather(1, place) / blocks.gather(1, place) - 1).abs().double().flatten()


@dataclass(frozen=True)
class Used:
    """Of E2M1's grid in a block whose greatest magnitude is a little above 3 times a power of two."""

    magnitudes: tuple[float, ...]  # that codes stand for, before the scale

    @property
    def binades(self) -> float:
        """From the least to the greatest that is not zero."""
        return math.log2(self.magnitudes[-1] / min(m for m in self.magnitudes if m))


@cache
def used(spec: str) -> Used:
    """The paper's example, its amax 3 + δ, and magnitudes down to nothing."""
    size = _cols(spec)
    x = torch.linspace(0, 3.01, 8 * size).reshape(size, 8).t().contiguous()  # in every row, shifted a little
    x[:, -1] = 3.01
    packed = encode(x, spec)
    codes = torch.stack((packed.codes & 0xF, packed.codes >> 4))
    grid = values_of(torch.arange(16), packed.quantizer.format).abs()
    return Used(tuple(sorted({float(value) for value in grid[codes.long()].flatten()})))


@exact("nvfp4", "N24")
def n24() -> Exact:
    """Near FP8's precision: no further off than E4M3's own nearest rounding may be."""
    least = paper("nvfp4").numbers["near-fp8"].value
    nv, mx, nv_used, mx_used = maxima(NVFP4), maxima(MXFP4), used(NVFP4), used(MXFP4)
    holds = (
        nv.share >= least
        and nv.most <= E4M3_HALF_STEP * (1 + 2**-20) < mx.most
        and nv_used.magnitudes[-2:] == (4.0, 6.0)
        and mx_used.magnitudes[-1] == 3.0
    )
    what = (
        f"one value in {round(1 / nv.share)}, its block's greatest, comes back within {nv.most:.2%} ({nv.mean:.2%} on "
        f"average, on normal values), where E4M3 itself may be {E4M3_HALF_STEP:.2%} off; under MXFP4 within "
        f"{mx.most:.1%} ({mx.mean:.2%}); of a block up to 3 + δ MXFP4 uses {mx_used.binades:.2f} binades, up to "
        f"±{mx_used.magnitudes[-1]:g}, and NVFP4 {nv_used.binades:.2f}, up to ±{nv_used.magnitudes[-1]:g}"
    )
    return Exact(holds, what, ("of blocks whose scale is a normal E4M3 number",))


# -------------------------------------------------------------------------------- N25


@cache
def products() -> tuple[float, float, int]:
    """Return how far products of rotated operands are from the plain one, as parts of its norm, and of how many cases.

    First all in FP64, then rotated in FP32 by the kernel that trains and multiplied in FP64. Operands are as Wgrad has
    them, summed over tokens; all sizes, with random signs and without.
    """
    dy, x = normal(1)[:256, :48].t(), normal(2)[:256, :64].t()
    plain = dy.double() @ x.double().t()
    double, single = [], []
    for size, signs in product(HADAMARD_SIZES, ("none", "5")):
        q = Quantizer.parse(f"fp32:rht{size}:signs={signs}")
        a, b = (_in_double(side, q) for side in (dy, x))
        double.append(_apart(a @ b.t(), plain))
        a, b = (fake_quantize(side.contiguous(), q).double() for side in (dy, x))
        single.append(_apart(a @ b.t(), plain))
    return max(double), max(single), len(double)


def _in_double(x: Tensor, q: Quantizer) -> Tensor:
    """Rows turned chunk by chunk, as the kernel turns them in FP32."""
    assert q.hadamard is not None
    signs = hadamard_signs(q, x.device)[: q.hadamard].double()
    return hadamard(x.double().unflatten(1, (-1, q.hadamard)) * signs).flatten(1)


def _apart(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


@exact("nvfp4", "N25")
def n25() -> Exact:
    """In FP64 to some roundings of it; the kernel's FP32 to no more than a few of FP32's."""
    double, single, cases = products()
    what = (
        f"over {cases} sizes and signs the products are apart by at most {double:.1e} of their norm in FP64, and by "
        f"{single:.1e} where the kernel rotates in FP32, which rounds by {SPACING:.1e}"
    )
    return Exact(double < 2.0**-48 and single < 16 * SPACING, what)


# -------------------------------------------------------------------------------- findings of our own


@dataclass(frozen=True)
class Bias:
    """Mean signed relative error, away from zero positive, with its standard error."""

    mean: float
    error: float

    @property
    def seen(self) -> bool:
        """Beyond five standard errors."""
        return abs(self.mean) > 5 * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.2%} ± {self.error:.2%}"


@dataclass(frozen=True)
class Biases:
    at_maxima: Bias  # of blocks
    elsewhere: Bias  # of all other values, weighted by their magnitude


@cache
def biases(spec: str) -> Biases:
    x, size = normal(), _cols(spec)
    y = fake_quantize(x, spec, seed=1 if "stochastic" in spec else None)
    blocks = x.reshape(-1, size)
    off = ((y - x) * x.sign()).reshape(-1, size).double()
    place = blocks.abs().argmax(1, keepdim=True)
    at = (off.gather(1, place) / blocks.gather(1, place).abs()).flatten()
    other = torch.ones_like(blocks, dtype=torch.bool).scatter(1, place, False)
    rest, weight = off[other], float(blocks[other].abs().double().mean())
    return Biases(
        Bias(float(at.mean()), float(at.std()) / math.sqrt(at.numel())),
        Bias(float(rest.mean()) / weight, float(rest.std()) / math.sqrt(rest.numel()) / weight),
    )


@exact("nvfp4", "S1")
def s1() -> Exact:
    stochastic, nearest, mx = biases(f"{NVFP4}:stochastic"), biases(NVFP4), biases(f"{MXFP4}:stochastic")
    holds = (
        stochastic.at_maxima.seen
        and stochastic.at_maxima.mean < 0
        and not stochastic.elsewhere.seen
        and not mx.at_maxima.seen
        and not mx.elsewhere.seen
    )
    what = (
        f"at block maxima {stochastic.at_maxima}, elsewhere {stochastic.elsewhere}; under MXFP4 {mx.at_maxima} and "
        f"{mx.elsewhere}; rounded to nearest NVFP4 has {nearest.at_maxima} and {nearest.elsewhere}"
    )
    return Exact(holds, what, ("normal values; the ± is a standard error",))


@dataclass(frozen=True)
class Turned:
    """What the transform does to a tensor with outliers, before it and after."""

    crest: tuple[float, float]  # a block's greatest magnitude over its root mean square, on average
    zeros: tuple[float, float]  # share of values
    error: tuple[float, float]  # relative, squared


@cache
def turned() -> Turned:
    """One value in a hundred twenty times as large."""
    x = normal(3)
    x = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(4)) < 0.01, 20 * x, x)
    plain, q = Quantizer.parse(NVFP4), Quantizer.parse(f"{NVFP4}:rht16")
    sides = (x, fake_quantize(x, plain)), (rotate(x, q, -1), fake_quantize(x, q))
    blocks = [source.reshape(-1, 16) for source, _ in sides]
    crest = [float((b.abs().amax(1) / b.square().mean(1).sqrt()).mean()) for b in blocks]
    zeros = [float((back == 0).double().mean()) for _, back in sides]
    error = [squared_error(source, back) for source, back in sides]
    return Turned((crest[0], crest[1]), (zeros[0], zeros[1]), (error[0], error[1]))


@exact("nvfp4", "S2")
def s2() -> Exact:
    found = turned()
    holds = found.crest[1] < found.crest[0] and found.zeros[1] < found.zeros[0] and found.error[1] > found.error[0]
    what = (
        f"of a block the greatest magnitude over its root mean square {found.crest[0]:.2f} → {found.crest[1]:.2f}, "
        f"zeros {found.zeros[0]:.1%} → {found.zeros[1]:.1%}, squared error {found.error[0]:.4f} → {found.error[1]:.4f}"
    )
    note = "one normal value in a hundred made twenty times as large; the paper supposes as much"
    return Exact(holds, what, (note,))
