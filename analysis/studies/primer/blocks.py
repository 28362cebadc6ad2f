"""Compute what the primer's texts state about blocks that share a scale: errors, bits, transposes, rotation, rounding.

001 is the first of the two texts (analysis/studies/primer/paper.yaml).
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE
from fewbits.kernels.packed import encode

SHAPE = (512, 1024)
SEED = 7


@cache
def samples() -> dict[str, Tensor]:
    """Return six tensors of SHAPE, each by the name of its distribution, drawn with a fixed seed."""
    drawn = torch.Generator().manual_seed(SEED)
    normal = torch.randn(SHAPE, generator=drawn)
    uniform = torch.rand(SHAPE, generator=drawn) * 2 - 1
    laplace = torch.empty(SHAPE).exponential_(generator=drawn) * torch.sign(uniform)
    chi = torch.randn((4, *SHAPE), generator=drawn).square().sum(0)
    outliers = torch.randn(SHAPE, generator=drawn)
    outliers[torch.rand(SHAPE, generator=drawn) < 0.001] *= 1000
    return {
        "normal": normal,
        "uniform": uniform,
        "Laplace": laplace,
        "t(4)": torch.randn(SHAPE, generator=drawn) / torch.sqrt(chi / 4),
        "lognormal": torch.exp(2 * torch.randn(SHAPE, generator=drawn)) * torch.sign(normal),
        "outliers": outliers,
    }


def relative_mse(x: Tensor, y: Tensor) -> float:
    """Return E(x − y)² / E x²."""
    return float((x.double() - y.double()).square().mean() / x.double().square().mean())


def error(x: Tensor, quantizer: str, seed: int = 0) -> float:
    """Return E(x − q(x))² / E x² for the quantizer q. seed: the seed of stochastic rounding."""
    return relative_mse(x, fake_quantize(x, quantizer, seed=seed))


@cache
def error_of(distribution: str, quantizer: str, seed: int = 0) -> float:
    """Return the relative squared error of a quantizer on the tensor of `samples()` with this distribution."""
    return error(samples()[distribution], quantizer, seed)


@cache
def error_of_small(distribution: str, quantizer: str, below: float = 10.0) -> float:
    """Return the relative squared error of the values whose magnitudes before quantization are less than `below`.

    The tensor of `samples()` with this distribution is quantized with all its values.
    """
    x = samples()[distribution]
    ordinary = x.abs() < below
    return relative_mse(x[ordinary], fake_quantize(x, quantizer)[ordinary])


def bits_per_element(quantizer: str, cols: int, tensor_scale: int = 0) -> float:
    """Return (bits of codes, block scales and tensor scale) / (number of elements) of a tensor of 16 rows.

    cols: the number of columns. tensor_scale: the bits of the tensor's scale.
    """
    packed = encode(torch.ones(16, cols), quantizer)
    assert packed.scales is not None
    stored = packed.codes.numel() * packed.codes.element_size() + packed.scales.numel() * packed.scales.element_size()
    return (8 * stored + tensor_scale) / (16 * cols)


def mx_scale(amax: float, emax: int, rule: str) -> int:
    """Return the exponent of the MX scale of a block with the largest magnitude amax.

    emax: the exponent of the format's largest number. rule: one of these:

    - floor, the first statement of the primer's text 001: ⌊log2 amax⌋ − emax
    - nearest, its second statement: the power of two nearest to amax / 2^emax, compared by logarithms (001 does not say
      to which number the power is nearest)
    - up: the smallest scale with which nothing saturates in E2M1, whose largest number is 6
    """
    exact = math.log2(amax) - emax
    if rule == "floor":
        return math.frexp(amax)[1] - 1 - emax
    if rule == "up":
        fraction, exponent = math.frexp(amax / TABLE["e2m1"].max)
        return exponent - (fraction == 0.5)
    return math.floor(exact + 0.5)


@cache
def mx_rules(distribution: str) -> dict[str, tuple[float, float]]:
    """Return two numbers by rule of `mx_scale`: MXFP4's relative squared error, and the share of saturated elements.

    The quantized tensor is the one of `samples()` with this distribution.
    """
    x, f = samples()[distribution].view(-1, 32), TABLE["e2m1"]
    amax = x.abs().amax(1).tolist()
    found = {}
    for rule in ("floor", "nearest", "up"):
        scale = torch.tensor([2.0 ** mx_scale(a, f.emax, rule) for a in amax])[:, None]
        scaled = x / scale
        found[rule] = (
            relative_mse(x, fake_quantize(scaled, "e2m1") * scale),
            float((scaled.abs() > f.max).float().mean()),
        )
    return found


def flushed_subnormals(quantizer: str) -> tuple[float, float]:
    """Return an MX quantizer's relative squared errors with subnormals, and with zeros in place of subnormals.

    The quantized tensor has normally distributed values. The primer's text 001 maps values below the smallest normal
    number to zero.
    """
    x, f = samples()["normal"], TABLE[quantizer.partition(":")[0]]
    y = fake_quantize(x, quantizer)
    blocks = x.view(-1, 32).abs().amax(1)
    scale = torch.tensor([2.0 ** mx_scale(a, f.emax, "floor") for a in blocks.tolist()])[:, None]
    normal = (x.view(-1, 32) / scale).abs() >= f.min_normal
    return relative_mse(x, y), relative_mse(x, torch.where(normal.view(SHAPE), y, 0.0))


def transpose_gap(quantizer: str, size: int | None = None) -> Tensor:
    """Return |Q(w) − Q(wᵀ)ᵀ| for a quantizer Q and a matrix w of normally distributed values.

    size: the number of rows and of columns of w; if it is None, w has SHAPE.
    """
    w = samples()["normal"][:size, :size]
    return (fake_quantize(w, quantizer) - fake_quantize(w.T.contiguous(), quantizer).T).abs()


def transpose_difference(quantizer: str) -> float:
    """Return ‖Q(w) − Q(wᵀ)ᵀ‖ / ‖w‖ for a quantizer Q and a matrix w of SHAPE with normally distributed values."""
    return float(transpose_gap(quantizer).norm() / samples()["normal"].norm())


def padded_dot(length: int) -> tuple[float, float]:
    """Return the dot product of two MXFP8 vectors of this length, and of the same vectors padded to whole blocks."""
    a, b = (samples()["normal"][i, :length] for i in (0, 1))
    whole = -(-length // 32) * 32
    dots = []
    for size in (length, whole):
        x, y = (torch.nn.functional.pad(v, (0, size - length)) for v in (a, b))
        qx, qy = (fake_quantize(v[None], "e4m3:1x32:mx")[0].double() for v in (x, y))
        dots.append(float((qx * qy).sum()))
    return dots[0], dots[1]


def draws(seeds: int) -> Tensor:
    """Return a tensor of normally distributed values, stochastically rounded to E2M1 once with each of several seeds.

    Before rounding, blocks of 16 values are scaled by powers of two; the result has the original scale. The first
    dimension is over the seeds. seeds: their number; they are 0, 1, …
    """
    x = samples()["normal"][:64]
    return torch.stack([fake_quantize(x, "e2m1:1x16:e8m0:stochastic", seed=s) for s in range(seeds)]).double()


def stochastic(seeds: int = 64) -> dict[str, tuple[float, float]]:
    """Return (bias, standard deviation) of rounding a tensor x to E2M1 by mode: nearest and stochastic.

    x has normally distributed values. seeds: the number of seeds with which x is rounded stochastically. The variance
    is over the seeds, averaged over the elements of x, and 0 for nearest. bias² is the mean over the elements of
    (mean over seeds − x)², minus variance / seeds. Without the second term, the random error of a mean over few seeds
    would count as bias. The bias is divided by the root mean square of x, which is about 1; the deviation is not.
    """
    x = samples()["normal"][:64]
    nearest = fake_quantize(x, "e2m1:1x16:e8m0").double()[None]
    found = {}
    for name, count, drawn in (("nearest", 1, nearest), ("stochastic", seeds, draws(seeds))):
        mean = drawn.mean(0)
        variance = drawn.var(0).mean() if count > 1 else torch.zeros(())
        bias = float((mean - x).square().mean() - variance / count)
        found[name] = math.sqrt(max(bias, 0.0)) / float(x.norm()) * x.numel() ** 0.5, float(variance.sqrt())
    return found


def error_of_mean(count: int) -> float:
    """Return ‖y − x‖ / ‖x‖, where y is the mean of `count` stochastic roundings of a tensor x to E2M1.

    x has normally distributed values. If `count` is 0, y is x rounded to nearest.
    """
    x = samples()["normal"][:64].double()
    y = draws(count).mean(0) if count else fake_quantize(x.float(), "e2m1:1x16:e8m0").double()
    return float((y - x).norm() / x.norm())


@cache
def with_outliers(factor: float) -> Tensor:
    """Return normally distributed numbers, 0.1 % of which are multiplied by `factor`.

    The numbers before this multiplication are the same for every factor.
    """
    drawn = torch.Generator().manual_seed(SEED)
    x = torch.randn((128, 1024), generator=drawn)
    return torch.where(torch.rand(x.shape, generator=drawn) < 0.001, factor * x, x)


def hadamard(k: int) -> Tensor:
    """Return the Hadamard matrix of size 2^k, whose entries are 1 and -1."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(k):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def rotated(x: Tensor) -> Tensor:
    """Return x after a Hadamard transform of every 16 neighbouring values in a row."""
    return (x.double().view(-1, 16) @ hadamard(4) / 4).view(x.shape)


def kurtosis(rotate: bool) -> float:
    """Return the kurtosis of the tensor `outliers` of `samples()`.

    rotate: first apply a Hadamard transform to every 16 neighbouring values in a row.
    """
    x = samples()["outliers"].double()
    x = rotated(x) if rotate else x
    x = x - x.mean()
    return float(x.pow(4).mean() / x.square().mean() ** 2)
