"""Check claims about NVFP4's arithmetic (N12, N24, N25, N29) and layers (N26) with our own kernels and models.

Two findings of our own concern the same kernels: stochastic rounding is biased where a block's scale was rounded down
(S1), and the Hadamard transform raises the squared error of tensors with outliers (S2). Values are normally
distributed, from a fixed seed, if a check does not name another tensor. Random results are averaged over so many values
that their own errors are negligible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.engine.results.paper import paper
from fewbits.experiments.config import load_recipe
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.packed import encode
from fewbits.kernels.quantizer import HADAMARD_SIZES, Quantizer
from fewbits.kernels.reference.elements import values_of
from fewbits.kernels.reference.rotation import hadamard, hadamard_signs, rotate
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import on_meta
from fewbits.models.quantize import keep, linear_layers
from fewbits.models.recipe import Keep

NVFP4, MXFP4 = "e2m1:1x16:nvfp4", "e2m1:1x32:e8m0"
SIDE = 1024
SPACING = 2.0**-24  # the greatest relative error of rounding to FP32
E4M3_HALF_STEP = 2.0**-4  # the greatest relative error of rounding a normal number to E4M3


@cache
def normal(seed: int = 0) -> Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def squared_error(x: Tensor, y: Tensor) -> float:
    """Return Σ (x − y)² / Σ x²."""
    return float((x.double() - y.double()).square().sum() / x.double().square().sum())


# -------------------------------------------------------------------------------- N12


@cache
def rounding_errors(spec: str) -> tuple[float, float]:
    """Return squared errors on normal values: rounded to nearest, and stochastically (`spec` without that option)."""
    x = normal()
    return squared_error(x, fake_quantize(x, spec)), squared_error(x, fake_quantize(x, f"{spec}:stochastic", seed=1))


@exact("nvfp4", "N12")
def n12() -> Exact:
    found = {name: rounding_errors(spec) for name, spec in (("NVFP4", NVFP4), ("MXFP4", MXFP4))}
    words = (
        f"{name} {stochastic:.4f} and {nearest:.4f}, a ratio of {stochastic / nearest:.2f}"
        for name, (nearest, stochastic) in found.items()
    )
    holds = all(stochastic > nearest for nearest, stochastic in found.values())
    return Exact(
        holds,
        "relative squared errors of normally distributed values, rounded stochastically and to nearest: "
        + "; ".join(words),
    )


# -------------------------------------------------------------------------------- N24


@dataclass(frozen=True)
class Maxima:
    """Relative errors of the greatest value of each block after quantization."""

    share: float  # the share of such values among all values: 1 / size of a block
    mean: float  # the mean error on normally distributed values
    most: float  # the greatest error, also over other blocks (see `maxima`)


@cache
def maxima(spec: str) -> Maxima:
    """Return the errors of blocks' greatest values with the quantizer `spec`.

    The mean is over blocks of normally distributed values; the greatest error also covers blocks whose greatest values
    have each of the 128 mantissas of BF16 once.
    """
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


@cache
def magnitudes_of_example(spec: str) -> tuple[float, ...]:
    """Return the magnitudes of E2M1 to which a quantizer rounds the scaled values of the paper's example, ascending.

    In the example, each block has values from 0 to 3 + δ, with a small δ. spec: the quantizer, as text.
    """
    size = _cols(spec)
    x = torch.linspace(0, 3.01, 8 * size).reshape(size, 8).t().contiguous()  # slightly different values in each row
    x[:, -1] = 3.01
    packed = encode(x, spec)
    codes = torch.stack((packed.codes & 0xF, packed.codes >> 4))
    grid = values_of(torch.arange(16), packed.quantizer.format).abs()
    return tuple(sorted({float(value) for value in grid[codes.long()].flatten()}))


def _binades(magnitudes: tuple[float, ...]) -> float:
    return math.log2(magnitudes[-1] / min(m for m in magnitudes if m))


@exact("nvfp4", "N24")
def n24() -> Exact:
    """Check NVFP4's errors at blocks' greatest values, their share of all values, and the paper's example.

    The errors may not exceed E4M3's largest rounding error, as some of MXFP4's do. In the example, the greatest
    magnitudes of E2M1 are 4 and 6 with NVFP4, and 3 with MXFP4.
    """
    least = paper("nvfp4").numbers["near-fp8"].value
    nv, mx, nv_used, mx_used = maxima(NVFP4), maxima(MXFP4), magnitudes_of_example(NVFP4), magnitudes_of_example(MXFP4)
    holds = (
        nv.share >= least
        and nv.most <= E4M3_HALF_STEP * (1 + 2**-20) < mx.most
        and nv_used[-2:] == (4.0, 6.0)
        and mx_used[-1] == 3.0
    )
    what = (
        f"the greatest value of a block, one in {round(1 / nv.share)}, has an error of at most {nv.most:.2%} "
        f"({nv.mean:.2%} on average for normally distributed values), E4M3 itself of at most {E4M3_HALF_STEP:.2%}, "
        f"MXFP4 of at most {mx.most:.1%} ({mx.mean:.2%} on average); in a block up to 3 + δ MXFP4 uses "
        f"{_binades(mx_used):.2f} binades, up to ±{mx_used[-1]:g}, and NVFP4 {_binades(nv_used):.2f}, up to "
        f"±{nv_used[-1]:g}"
    )
    return Exact(holds, what, ("for blocks whose scale is a normal E4M3 number",))


# -------------------------------------------------------------------------------- N25


@cache
def products() -> tuple[float, float, int]:
    """Return how much a product changes if a Hadamard transform rotates both operands, and the number of cases.

    Two distances, each the greatest ‖rotated product − product‖ / ‖product‖ over all sizes of the transform, with and
    without random signs: for operands rotated in FP64, and for operands that the training kernel rotates in FP32.
    Products are computed in FP64. The operands are like those of Wgrad, which sums over tokens.
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
    """Return x after the Hadamard transform of the quantizer q, computed in FP64 (the kernel computes it in FP32)."""
    assert q.hadamard is not None
    signs = hadamard_signs(q, x.device)[: q.hadamard].double()
    return hadamard(x.double().unflatten(1, (-1, q.hadamard)) * signs).flatten(1)


def _apart(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


@exact("nvfp4", "N25")
def n25() -> Exact:
    double, single, cases = products()
    what = (
        f"in {cases} cases of sizes and signs the products differ by at most {double:.1e} of their norm in FP64, and "
        f"by at most {single:.1e} if the kernel rotates in FP32, whose rounding error is up to {SPACING:.1e}"
    )
    return Exact(double < 2.0**-48 and single < 16 * SPACING, what)


# -------------------------------------------------------------------------------- N26


@cache
def kept(model: str, first: int, last: int) -> tuple[int, int]:
    """Return how many linear layers of a preset NVFP4's recipe keeps in BF16, and the number of all linear layers.

    first, last: how many blocks at the start and at the end of the model stay in BF16.
    """
    found = list(linear_layers(on_meta(MODELS[model])))
    recipe = replace(load_recipe("nvfp4"), keep=Keep(first=first, last=last))
    return len(keep(recipe, found, 1 + max(layer.block for layer in found))), len(found)


@exact("nvfp4", "N26")
def n26() -> Exact:
    """Check that the shares of layers in BF16, rounded to whole percent, are those that the paper states.

    In the paper, the linear layers of the first two and the last eight blocks of the 12B model are in BF16, and of the
    8B model those of the last eight blocks.
    """
    found = {"12B": kept("hybrid-12b", 2, 8), "8B": kept("hybrid-8b", 0, 8)}
    stated = {name: paper("nvfp4").numbers[f"kept-{name.lower()}"].value for name in found}
    holds = all(abs(of / layers - stated[name]) < 0.005 for name, (of, layers) in found.items())
    words = (
        f"{name} {of} of {layers}, {of / layers:.1%} (the paper: {stated[name]:.0%})"
        for name, (of, layers) in found.items()
    )
    return Exact(holds, "; ".join(words))


# -------------------------------------------------------------------------------- N29


@exact("nvfp4", "N29")
def n29() -> Exact:
    values = normal()
    nv, mx = (float((fake_quantize(values, Quantizer.parse(spec)) == 0).double().mean()) for spec in (NVFP4, MXFP4))
    return Exact(nv < mx, f"{nv:.1%} of normally distributed values become zero in NVFP4, {mx:.1%} in MXFP4")


# -------------------------------------------------------------------------------- findings of our own


@dataclass(frozen=True)
class Bias:
    """A mean relative error, which is positive if magnitudes become larger, with its standard error."""

    mean: float
    error: float

    @property
    def seen(self) -> bool:
        """True if the mean differs from zero by more than five standard errors."""
        return abs(self.mean) > 5 * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.2%} ± {self.error:.2%}"


@dataclass(frozen=True)
class Biases:
    at_maxima: Bias  # the bias of blocks' greatest values
    elsewhere: Bias  # the bias of all other values, weighted by their magnitude


@cache
def biases(spec: str) -> Biases:
    """Return the quantizer's biases on normally distributed values: of blocks' greatest values, and of all others."""
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
        f"the bias is {stochastic.at_maxima} for blocks' greatest values and {stochastic.elsewhere} for others; with "
        f"MXFP4 {mx.at_maxima} and {mx.elsewhere}; with NVFP4 rounded to nearest {nearest.at_maxima} and "
        f"{nearest.elsewhere}"
    )
    return Exact(holds, what, ("for normally distributed values; ± is a standard error",))


@dataclass(frozen=True)
class Turned:
    """Three quantities of a tensor with outliers; each pair has the number without and with the Hadamard transform."""

    crest: tuple[float, float]  # the mean over blocks of (greatest magnitude / root mean square) before quantization
    zeros: tuple[float, float]  # the share of values that become zero
    error: tuple[float, float]  # the relative squared error of the quantization


@cache
def turned() -> Turned:
    """Measure NVFP4 with and without the Hadamard transform (see Turned) on values with outliers.

    The values are normally distributed, and 1 % of them are multiplied by 20.
    """
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
        "the transform changes blocks' greatest magnitude divided by their root mean square from "
        f"{found.crest[0]:.2f} to {found.crest[1]:.2f}, the share of zeros from {found.zeros[0]:.1%} to "
        f"{found.zeros[1]:.1%} and the squared error from {found.error[0]:.4f} to {found.error[1]:.4f}"
    )
    note = "one in a hundred normally distributed values is made twenty times as large"
    return Exact(holds, what, (note,))
