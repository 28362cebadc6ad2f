"""Check claims about NVFP4's arithmetic (N12, N24, N25, N29) and layers (N26) with our own kernels and models.

Three findings of our own concern the same kernels: stochastic rounding is biased where a block's scale was rounded down
(S1), the Hadamard transform raises the squared error of tensors with outliers (S2), and rounding gradients to nearest
moves a linear layer away from its optimum (F2). Values are normally
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
from fewbits.kernels.seeds import derive_seed
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import on_meta
from fewbits.models.quantize import keep
from fewbits.models.recipe import Keep
from fewbits.models.weights import linear_layers

NVFP4, MXFP4 = "e2m1:1x16:nvfp4", "e2m1:1x32:e8m0"
SIDE = 1024
SPACING = 2.0**-24  # the greatest relative error of rounding to FP32
E4M3_HALF_STEP = 2.0**-4  # the greatest relative error of rounding a normal number to E4M3
NUMBERS = paper("nvfp4").numbers


@cache
def normal(seed: int = 0) -> Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def squared_error(x: Tensor, y: Tensor) -> float:
    """Return Σ (x − y)² / Σ x²."""
    return float((x.double() - y.double()).square().sum() / x.double().square().sum())


def rounding_errors(spec: str) -> tuple[float, float]:
    """Return squared errors on normal values: rounded to nearest, and stochastically (`spec` without that option)."""
    x = normal()
    return squared_error(x, fake_quantize(x, spec)), squared_error(x, fake_quantize(x, f"{spec}:stochastic", seed=1))


@exact("nvfp4", "N12")
def n12() -> Exact:
    found = {name: rounding_errors(spec) for name, spec in (("NVFP4", NVFP4), ("MXFP4", MXFP4))}
    words = "; ".join(
        f"{name} {stochastic:.4f} and {nearest:.4f}, a ratio of {stochastic / nearest:.2f}"
        for name, (nearest, stochastic) in found.items()
    )
    what = "relative squared errors of normally distributed values, rounded stochastically and to nearest"
    return Exact(all(stochastic > nearest for nearest, stochastic in found.values()), f"{what}: {words}")


# -------------------------------------------------------------------------------- N24, S1: blocks' greatest values


def errors(x: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    """Quantize x; return the relative errors of blocks' greatest values, and the errors of all other values.

    The latter are in units of the mean magnitude of the other values. An error is positive if a magnitude increases.
    """
    blocks = x.double().reshape(-1, _cols(spec))
    y = fake_quantize(x, spec, seed=1 if "stochastic" in spec else None)
    off = (y.double().reshape(blocks.shape) - blocks) * blocks.sign()
    place = blocks.abs().argmax(1, keepdim=True)
    other = torch.ones_like(blocks, dtype=torch.bool).scatter(1, place, False)
    return (off / blocks.abs()).gather(1, place).flatten(), off[other] / blocks[other].abs().mean()


def _cols(spec: str) -> int:
    cols = Quantizer.parse(spec).block.cols
    assert cols is not None
    return cols


def errors_at_maxima(spec: str) -> tuple[float, float]:
    """Return the mean error of blocks' greatest values, normally distributed, and the greatest, over all mantissas."""
    mantissas = (1 + torch.arange(128.0) / 128)[:, None]
    every = torch.cat([mantissas, (0.01 * mantissas).expand(-1, _cols(spec) - 1)], 1)
    usual, other = (errors(x, spec)[0].abs() for x in (normal(), every))
    return float(usual.mean()), float(max(usual.max(), other.max()))


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


@exact("nvfp4", "N24")
def n24() -> Exact:
    """Check NVFP4's errors at blocks' greatest values, their share of all values, and the paper's example.

    The errors may not exceed E4M3's largest rounding error, as some of MXFP4's do. In the example, the greatest
    magnitudes of E2M1 are 4 and 6 with NVFP4, and 3 with MXFP4.
    """
    (nv_mean, nv_most), (mx_mean, mx_most) = errors_at_maxima(NVFP4), errors_at_maxima(MXFP4)
    nv_used, mx_used = magnitudes_of_example(NVFP4), magnitudes_of_example(MXFP4)
    nv_binades, mx_binades = (math.log2(used[-1] / min(filter(None, used))) for used in (nv_used, mx_used))
    within = nv_most <= E4M3_HALF_STEP * (1 + 2**-20) < mx_most
    enough = 1 / _cols(NVFP4) >= NUMBERS["near-fp8"].value
    what = (
        f"the greatest value of a block, one in {_cols(NVFP4)}, has an error of at most {nv_most:.2%} "
        f"({nv_mean:.2%} on average for normally distributed values), E4M3 itself of at most {E4M3_HALF_STEP:.2%}, "
        f"MXFP4 of at most {mx_most:.1%} ({mx_mean:.2%} on average); in a block up to 3 + δ MXFP4 uses "
        f"{mx_binades:.2f} binades, up to ±{mx_used[-1]:g}, and NVFP4 {nv_binades:.2f}, up to ±{nv_used[-1]:g}"
    )
    holds = within and enough and nv_used[-2:] == (4.0, 6.0) and mx_used[-1] == 3.0
    return Exact(holds, what, ("for blocks whose scale is a normal E4M3 number",))


@dataclass(frozen=True)
class Bias:
    """A mean relative error, which is positive if magnitudes become larger, with its standard error."""

    mean: float
    error: float

    @staticmethod
    def of(errors: Tensor) -> Bias:
        return Bias(float(errors.mean()), float(errors.std()) / math.sqrt(errors.numel()))

    @property
    def seen(self) -> bool:
        """True if the mean differs from zero by more than five standard errors."""
        return abs(self.mean) > 5 * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.2%} ± {self.error:.2%}"


def biases(spec: str) -> tuple[Bias, Bias]:
    """Return the quantizer's biases on normally distributed values: of blocks' greatest values, and of all others."""
    at_maxima, elsewhere = errors(normal(), spec)
    return Bias.of(at_maxima), Bias.of(elsewhere)


@exact("nvfp4", "S1")
def s1() -> Exact:
    stochastic, nearest, mx = biases(f"{NVFP4}:stochastic"), biases(NVFP4), biases(f"{MXFP4}:stochastic")
    top, rest = stochastic
    what = (
        f"the bias is {top} for blocks' greatest values and {rest} for others; with MXFP4 {mx[0]} and {mx[1]}; with "
        f"NVFP4 rounded to nearest {nearest[0]} and {nearest[1]}"
    )
    holds = top.seen and top.mean < 0 and not any(one.seen for one in (rest, *mx))
    return Exact(holds, what, ("for normally distributed values; ± is a standard error",))


# -------------------------------------------------------------------------------- N25, S2: the Hadamard transform


def products() -> tuple[float, float, int]:
    """Return how much a product changes if a Hadamard transform rotates both operands, and the number of cases.

    Two distances, each the greatest ‖rotated product − product‖ / ‖product‖ over all sizes of the transform, with and
    without random signs: for operands rotated in FP64, and for operands that the training kernel rotates in FP32.
    Products are computed in FP64. The operands are like those of Wgrad, which sums over tokens.
    """
    dy, x = normal(1)[:256, :48].t(), normal(2)[:256, :64].t()
    plain = dy.double() @ x.double().t()

    def in_double(x: Tensor, q: Quantizer) -> Tensor:
        assert q.hadamard is not None
        signs = hadamard_signs(q, x.device)[: q.hadamard].double()
        return hadamard(x.double().unflatten(1, (-1, q.hadamard)) * signs).flatten(1)

    def by_kernel(x: Tensor, q: Quantizer) -> Tensor:
        return fake_quantize(x.contiguous(), q)

    def apart(a: Tensor, b: Tensor) -> float:
        return float(torch.linalg.vector_norm(a.double() @ b.double().t() - plain) / torch.linalg.vector_norm(plain))

    cases = [Quantizer.parse(f"fp32:rht{n}:signs={signs}") for n, signs in product(HADAMARD_SIZES, ("none", "5"))]
    double, single = (max(apart(turn(dy, q), turn(x, q)) for q in cases) for turn in (in_double, by_kernel))
    return double, single, len(cases)


@exact("nvfp4", "N25")
def n25() -> Exact:
    double, single, cases = products()
    what = (
        f"in {cases} cases of sizes and signs the products differ by at most {double:.1e} of their norm in FP64, and "
        f"by at most {single:.1e} if the kernel rotates in FP32, whose rounding error is up to {SPACING:.1e}"
    )
    return Exact(double < 2.0**-48 and single < 16 * SPACING, what)


def turned() -> dict[str, tuple[float, float]]:
    """Return three quantities of values with outliers, each without and with the Hadamard transform, in NVFP4.

    crest: the mean over blocks of (greatest magnitude / root mean square) before quantization. zeros: the share of
    values that become zero. error: the relative squared error. The values are normally distributed, and 1 % of them are
    multiplied by 20.
    """
    x = normal(3)
    x = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(4)) < 0.01, 20 * x, x)
    q = Quantizer.parse(f"{NVFP4}:rht16")
    (plain, back), (rotated, back_rotated) = (x, fake_quantize(x, NVFP4)), (rotate(x, q, -1), fake_quantize(x, q))

    def crest(x: Tensor) -> float:
        blocks = x.reshape(-1, 16)
        return float((blocks.abs().amax(1) / blocks.square().mean(1).sqrt()).mean())

    return {
        "crest": (crest(plain), crest(rotated)),
        "zeros": (float((back == 0).double().mean()), float((back_rotated == 0).double().mean())),
        "error": (squared_error(plain, back), squared_error(rotated, back_rotated)),
    }


@exact("nvfp4", "S2")
def s2() -> Exact:
    crest, zeros, error = turned().values()
    what = (
        f"the transform changes blocks' greatest magnitude divided by their root mean square from {crest[0]:.2f} to "
        f"{crest[1]:.2f}, the share of zeros from {zeros[0]:.1%} to {zeros[1]:.1%} and the squared error from "
        f"{error[0]:.4f} to {error[1]:.4f}"
    )
    note = "one in a hundred normally distributed values is made twenty times as large"
    return Exact(crest[1] < crest[0] and zeros[1] < zeros[0] and error[1] > error[0], what, (note,))


# -------------------------------------------------------------------------------- F2

CLASSES, STEPS, RATE = 64, 400, 0.5


def excess(spec: str, seed: int) -> float:
    """Return the loss above the entropy after SGD from the optimum, with gradients quantized in blocks along the batch.

    The layer has a logit for each class and no input; the rate falls to zero.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = 1 / torch.arange(1, CLASSES + 1, dtype=torch.float64)
    wanted /= wanted.sum()
    logits = wanted.log().float()
    for step in range(STEPS):
        targets = torch.multinomial(wanted, CLASSES, replacement=True, generator=generator)
        gradients = logits.softmax(0)[:, None] - torch.nn.functional.one_hot(targets, CLASSES).T
        rounded = fake_quantize(gradients, spec, seed=derive_seed(seed, step))
        logits = logits - RATE * (1 - step / STEPS) * rounded.mean(1)
    return float((wanted * (wanted.log() - logits.double().log_softmax(0))).sum())


@exact("nvfp4", "F2")
def f2() -> Exact:
    pairs = [(excess(NVFP4, seed), excess(f"{NVFP4}:stochastic", seed)) for seed in range(8)]
    nearest, stochastic = (sum(losses) / len(losses) for losses in zip(*pairs, strict=True))
    what = f"the loss stays {nearest:.4f} nats above the entropy if rounded to nearest, {stochastic:.4f} stochastically"
    return Exact(all(a > 2 * b for a, b in pairs), what)


# -------------------------------------------------------------------------------- N26, N29


def kept(model: str, first: int, last: int) -> tuple[int, int]:
    """Return how many linear layers of a preset stay in BF16 in its first and last blocks, and how many it has."""
    found = list(linear_layers(on_meta(MODELS[model])))
    recipe = replace(load_recipe("nvfp4"), keep=Keep(first=first, last=last))
    return len(keep(recipe, found, 1 + max(layer.block for layer in found))), len(found)


@exact("nvfp4", "N26")
def n26() -> Exact:
    """Check that the shares of layers in BF16, rounded to whole percent, are those that the paper states."""
    found = {"12B": kept("hybrid-12b", 2, 8), "8B": kept("hybrid-8b", 0, 8)}
    stated = {name: NUMBERS[f"kept-{name.lower()}"].value for name in found}
    holds = all(abs(of / layers - stated[name]) < 0.005 for name, (of, layers) in found.items())
    words = (
        f"{name} {of} of {layers}, {of / layers:.1%} (the paper: {stated[name]:.0%})"
        for name, (of, layers) in found.items()
    )
    return Exact(holds, "; ".join(words))


@exact("nvfp4", "N29")
def n29() -> Exact:
    nv, mx = (float((fake_quantize(normal(), spec) == 0).double().mean()) for spec in (NVFP4, MXFP4))
    return Exact(nv < mx, f"{nv:.1%} of normally distributed values become zero in NVFP4, {mx:.1%} in MXFP4")
