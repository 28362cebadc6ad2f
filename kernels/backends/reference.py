"""Define the arithmetic of kernels in plain torch, which every backend follows to the bit.

The code follows README.md of the kernels package, in its order and terms, to be read next to the papers. It is slow and
obvious: whole matrices, one rounding per line. Matrices are 2-D, contiguous, bf16, fp16 or float32.

Scales and scaled values are float32, and each operation is rounded once. Rounding to a grid happens in float64, where
the division of a float32 by a power of two and the difference to the nearest integer are exact. Powers of two and
exponents are built from bits, because exp2, log2 and ldexp do not guarantee the last bit.

    source ──largest──> amax per block ──choose_scales──> Scales ──encode_factors──> s
    source · s ──round_to_grid──> grid values ──restore──> the result of quantize
                                       └──codes_of──pack──> the result of encode, with the Scales
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.backends.reference_noise import gaussian_noise, philox, uniform, uniform_noise, unpack_noise
from fewbits.kernels.formats import TABLE, Format
from fewbits.kernels.packing import pack, scale_codes, stored_scales, unpack
from fewbits.kernels.quantizer import Quantizer

__all__ = [
    "decode",
    "encode",
    "extent",
    "gaussian_noise",
    "philox",
    "quantize",
    "quantize_both",
    "rotate",
    "sample_weight",
    "sample_weight_backward",
    "uniform_noise",
    "unpack_noise",
]

Part = tuple[int, int]  # rows × columns of a block, or of a part of a partition
Noise = Literal["gaussian", "uniform"]

FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN = 2.0**-126  # the smallest normal float32
TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


# Float bits


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64, built from its bits."""
    return (exponent.long() + 1023 << 52).view(torch.float64)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split x = mantissa · 2^exponent with 1 ≤ |mantissa| < 2; the exponent of 0 is below all others."""
    half, exponent = torch.frexp(x.double())
    return half * 2, torch.where(x == 0, -1022, exponent - 1)


def divide(dividend: float, x: Tensor) -> Tensor:
    """Return dividend / x by one division; with a Python number torch might multiply by a reciprocal."""
    return torch.full_like(x, dividend) / x


# Parts of a matrix


def resolve_block(x: Tensor, q: Quantizer, axis: int) -> Part:
    rows, cols = x.shape
    return q.block.resolve(rows, cols, axis)


def fold(x: Tensor, part: Part, fill: float = 0) -> Tensor:
    """Reshape [rows, cols] to [parts down, rows of a part, parts across, columns of a part], with padded edges."""
    r, c = (min(size, max(n, 1)) for size, n in zip(part, x.shape, strict=True))
    padded = F.pad(x, (0, -x.shape[1] % c, 0, -x.shape[0] % r), value=fill)
    return padded.reshape(padded.shape[0] // r, r, padded.shape[1] // c, c)


def spread(grid: Tensor, part: Part, shape: Sequence[int]) -> Tensor:
    """Expand one value per part to one per element."""
    row, column = (torch.arange(n, device=grid.device) // size for n, size in zip(shape, part, strict=True))
    return grid[row[:, None], column]


def largest(x: Tensor, part: Part) -> Tensor:
    """Return the largest magnitude in each part of a float32 matrix, compared as bits: finite < inf < NaN."""
    magnitudes = x.view(torch.int32) & 0x7FFFFFFF
    return fold(magnitudes, part).amax((1, 3)).view(torch.float32)


# Elements


def round_to_grid(v: Tensor, grid: Format, draws: Tensor | None = None) -> Tensor:
    """Round v in float64 to the grid without an upper limit of the exponent: to nearest, or stochastically by draws."""
    exponent = split(v)[1].clamp(grid.emin, 127)
    step = power_of_two(exponent - grid.mantissa_bits)
    steps = v.double() / step
    rounded = steps.round()  # ties to even
    if draws is not None:
        difference = steps - rounded
        rounded = torch.where(draws < difference.abs(), rounded + difference.sign(), rounded)
    return torch.copysign(rounded * step, v.double())


def codes_of(values: Tensor, grid: Format) -> Tensor:
    """Return the codes of grid values: a sign above the steps counted from zero.

    Equals Format.code_of, except that NaN has no sign.
    """
    magnitude = torch.where(values.isfinite(), values.abs(), 0)
    exponent = split(magnitude)[1].clamp(min=grid.emin)
    steps = magnitude.double() / power_of_two(exponent - grid.mantissa_bits)
    codes = steps.long() + (exponent.long() - grid.emin << grid.mantissa_bits)
    if grid.has_inf:
        codes = torch.where(values.isinf(), grid.code_of(math.inf, "inf"), codes)
    if grid.has_nan:
        codes = torch.where(values.isnan(), grid.code_of(math.nan), codes)
    negative = values.signbit() & ~values.isnan()
    return (codes | negative.long() << grid.bits - 1).to(torch.int32)


def values_of(codes: Tensor, grid: Format) -> Tensor:
    """Return the float32 values of codes."""
    magnitude_bits = grid.exponent_bits + grid.mantissa_bits
    magnitude = codes.long() & (1 << magnitude_bits) - 1
    field, fraction = magnitude >> grid.mantissa_bits, magnitude & (1 << grid.mantissa_bits) - 1
    steps = fraction + ((field > 0).long() << grid.mantissa_bits)
    values = steps * power_of_two(field.clamp(min=1) - grid.bias - grid.mantissa_bits)
    values = torch.where(magnitude > grid.max_code, math.nan, values)
    if grid.has_inf:
        values = torch.where(magnitude == grid.code_of(math.inf, "inf"), math.inf, values)
    negative = codes.long() >> magnitude_bits & 1
    return torch.where(negative == 1, -values, values).float()


# Scales


@dataclass(frozen=True)
class Scales:
    """The stored part of the scales; encoding uses nothing else, so decoding cannot differ from it."""

    codes: Tensor  # int32, one per block
    groups: Tensor  # float32: the mantissa of each group (gam), d (two levels), or empty


NAN_CODES = {
    "none": 0,
    "amax": 0x7FC00000,
    "gam": 0xFF,
    "e8m0": 0xFF,
    "mx": 0xFF,
    "nvfp4": 0x7F,
    "ue5m3": 0xFF,
    "fouroversix": 0x7F,
    "eden": 0x7F,
}


@dataclass(frozen=True)
class TwoLevels:
    """A scaling with block scales in a format of their own and a float32 scale of the tensor."""

    scales: Format
    target: float  # the block scale that results from the tensor's amax
    top: float | None = None  # what a block's amax is mapped to, if not the format's largest value


TWO_LEVELS = {
    "nvfp4": TwoLevels(TABLE["e4m3"], 448),
    "ue5m3": TwoLevels(TABLE["ue5m3"], 448),
    "fouroversix": TwoLevels(TABLE["e4m3"], 256),  # leaves headroom for the factor 1.5
    "eden": TwoLevels(TABLE["e4m3"], 256, top=96 / 15.81),  # 6 · 16/17 / 0.93: least error on Gaussian data
}


def ideal(amax: Tensor, grid: Format) -> Tensor:
    """Return the factor that maps amax to the largest value of the grid."""
    return torch.where(amax == 0, 1, divide(grid.max, amax).clamp(FLT_MIN, FLT_MAX))


def group_amax(amax: Tensor, q: Quantizer, axis: int) -> Tensor:
    """Return the largest amax of each group of blocks, to broadcast; padding with a zero handles empty groups."""
    if q.group == "tensor":
        return F.pad(amax, (0, 1, 0, 1)).amax((0, 1), keepdim=True)
    if axis == -1:
        return F.pad(amax, (0, 1)).amax(1, keepdim=True)
    return F.pad(amax, (0, 0, 0, 1)).amax(0, keepdim=True)


def choose_scales(amax: Tensor, q: Quantizer, axis: int, expansion: float = 1.0) -> Scales:
    """Choose the scales of blocks with these amaxes; `expansion` enlarges block scales of two-level scalings."""
    poisoned = ~amax.isfinite()
    amax = torch.where(poisoned, 0, amax)
    codes, groups = torch.zeros_like(amax, dtype=torch.int32), amax.new_empty(0)
    match q.scaling:
        case "amax":
            codes = ideal(amax, q.format).view(torch.int32)
        case "gam":  # MoR, algorithm 1
            group_mantissa, group_exponent = split(ideal(group_amax(amax, q, axis), q.format))
            mantissa, exponent = split(ideal(amax, q.format))
            exponent = exponent - (mantissa < group_mantissa).int()  # one binade lower, or the block would saturate
            codes = torch.where(amax == 0, group_exponent, exponent) + 127
            groups = group_mantissa.float().flatten()
        case "e8m0" | "mx":
            mantissa, exponent = split(amax)
            max_mantissa, max_exponent = split(torch.full_like(amax, q.format.max))
            exponent = max_exponent - exponent
            if q.scaling == "e8m0":
                exponent = exponent - (mantissa > max_mantissa).int()
            codes = 127 - torch.where(amax == 0, 0, exponent.clamp(-127, 127))
        case "nvfp4" | "ue5m3" | "fouroversix" | "eden":  # NVFP4 eqs. 1-3, in TransformerEngine's order of operations
            levels = TWO_LEVELS[q.scaling]
            tensor_amax = group_amax(amax, q, axis)
            top = torch.full_like(tensor_amax, levels.top or q.format.max)
            g = torch.where(tensor_amax == 0, 1, (top * levels.target / tensor_amax).clamp(max=FLT_MAX))
            s8 = (amax * (g * divide(1, top)) * expansion).clamp(max=levels.scales.max)
            codes = codes_of(round_to_grid(s8, levels.scales), levels.scales)
            groups = divide(1, g).flatten()
    return Scales(torch.where(poisoned, NAN_CODES[q.scaling], codes).to(torch.int32), groups)


def group_grid(scales: Scales, axis: int) -> Tensor:
    """Return group values as a grid that broadcasts against the blocks; a row of blocks runs along the axis."""
    return scales.groups.unsqueeze(1 if axis == -1 else 0)


def encode_factors(scales: Scales, q: Quantizer, axis: int) -> Tensor:
    """Return the factor s of each block; NaN for a NaN block."""
    codes = scales.codes
    match q.scaling:
        case "amax":
            return codes.view(torch.float32)
        case "gam":
            s = group_grid(scales, axis) * power_of_two(codes - 127)  # ≥ 2^-126: the group's ideal is the smallest
            return torch.where(codes == 0xFF, math.nan, s).float()
        case "e8m0" | "mx":
            return torch.where(codes == 0xFF, math.nan, power_of_two(127 - codes)).float()
        case "nvfp4" | "ue5m3" | "fouroversix" | "eden":
            s8 = values_of(codes, TWO_LEVELS[q.scaling].scales)
            return divide(1, s8 * group_grid(scales, axis)).clamp(max=FLT_MAX)
    return torch.ones_like(codes, dtype=torch.float32)


def restore(values: Tensor, scales: Scales, q: Quantizer, axis: int, dtype: torch.dtype) -> Tensor:
    """Map grid values back to the range of the source, in the given dtype."""
    block, shape = resolve_block(values, q, axis), values.shape
    y = values
    match q.scaling:
        case "amax" | "gam":
            y = values / spread(encode_factors(scales, q, axis), block, shape)
        case "e8m0" | "mx":
            inverse = torch.where(scales.codes == 0xFF, math.nan, power_of_two(scales.codes - 127)).float()
            y = values * spread(inverse, block, shape)
        case "nvfp4" | "ue5m3" | "fouroversix" | "eden":
            s8 = spread(values_of(scales.codes, TWO_LEVELS[q.scaling].scales), block, shape)
            y = torch.where(s8 == 0, torch.copysign(s8, values), values * s8 * group_grid(scales, axis))
    limit = torch.finfo(dtype).max
    return torch.where(values.isinf(), y, y.clamp(-limit, limit)).to(dtype)  # an overflow to inf stays inf


# Rotation


def hadamard_signs(q: Quantizer, device: torch.device) -> Tensor:
    if q.signs == "te":
        return torch.tensor(TE_SIGNS, dtype=torch.float32, device=device)
    if q.signs == "none":
        return torch.ones(128, device=device)
    assert isinstance(q.signs, int)
    four = philox(torch.zeros((), dtype=torch.int64, device=device), 3, q.signs)
    bits = four[:, None] >> torch.arange(32, device=device) & 1
    return 1 - 2 * bits.flatten().float()


def hadamard(x: Tensor) -> Tensor:
    """Multiply rows by the orthonormal Hadamard matrix of their length 2^k.

    The power of two is applied first, to avoid overflow.
    """
    size = x.shape[-1]
    k = size.bit_length() - 1
    x = x * 2.0 ** -(k // 2)
    for distance in (1 << j for j in range(k)):
        a, b = x.unflatten(-1, (size // (2 * distance), 2, distance)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    return x * math.sqrt(0.5) if k % 2 else x


def rotate(x: Tensor, q: Quantizer, axis: int, inverse: bool = False) -> Tensor:
    """Multiply chunks of q.hadamard values along the axis by S·H (NVFP4 eq. 6), or by its inverse H·S, in x's dtype."""
    if q.hadamard is None:
        return x
    lines = (x if axis == -1 else x.t()).float()
    signs = hadamard_signs(q, x.device)
    length = lines.shape[1]
    rotated, start, size = [], 0, q.hadamard
    while size:  # whole chunks first, then the rest in ever smaller powers of two
        count = (length - start) // size
        chunks = lines[:, start : start + count * size].unflatten(1, (count, size))
        own_signs = signs[start % q.hadamard :][:size]
        chunks = hadamard(chunks) * own_signs if inverse else hadamard(chunks * own_signs)
        rotated.append(chunks.flatten(1))
        start, size = start + count * size, size // 2
    y = torch.cat(rotated, dim=1)
    return (y if axis == -1 else y.t()).to(x.dtype).contiguous()


# Quantization


@dataclass(frozen=True)
class Rounded:
    """A matrix on the grid, with its source and scales."""

    source: Tensor  # the rotated matrix in float32
    scales: Scales
    values: Tensor  # grid values, float32: the source scaled and rounded
    overflowed: Tensor  # True where rounding exceeded the format's maximum


def round_matrix(x: Tensor, q: Quantizer, axis: int, seed: int) -> Rounded:
    source = rotate(x, q, axis).float()
    amax = largest(source, resolve_block(x, q, axis))
    draws = uniform(x.numel(), seed, x.device).view(x.shape) if q.rounding == "stochastic" else None
    if q.scaling == "fouroversix":
        return four_over_six(source, amax, q, axis, draws)
    if q.scaling == "eden":
        return ms_eden(source, amax, q, axis, seed)
    return round_with(choose_scales(amax, q, axis), source, q, axis, draws)


def scaled_by(scales: Scales, source: Tensor, q: Quantizer, axis: int) -> Tensor:
    return source * spread(encode_factors(scales, q, axis), resolve_block(source, q, axis), source.shape)


def round_with(scales: Scales, source: Tensor, q: Quantizer, axis: int, draws: Tensor | None) -> Rounded:
    scaled = scaled_by(scales, source, q, axis)
    rounded = round_to_grid(scaled, q.format, draws)
    overflowed = source.isfinite() & (rounded.abs() > q.format.max)
    beyond = {"saturate": q.format.max, "nan": math.nan, "inf": math.inf}[q.overflow]
    values = torch.where(overflowed, torch.copysign(torch.full_like(rounded, beyond), rounded), rounded)
    if not q.format.has_inf:  # a remaining infinity comes from the source itself, with scaling none
        values = torch.where(values.isinf(), math.nan, values)
    if q.scaling in TWO_LEVELS:
        values = without_lost_blocks(values, scales, q, axis)
    return Rounded(source, scales, values.float(), overflowed)


def without_lost_blocks(values: Tensor, scales: Scales, q: Quantizer, axis: int) -> Tensor:
    """Set blocks whose scale is 0 to zeros that keep their signs."""
    lost = spread(scales.codes == 0, resolve_block(values, q, axis), values.shape)
    return torch.where(lost, torch.zeros_like(values).copysign(values), values)


def four_over_six(source: Tensor, amax: Tensor, q: Quantizer, axis: int, draws: Tensor | None) -> Rounded:
    """Quantize each block with its maximum mapped to 6, or to 4 if the error of that is smaller."""
    six, four = (round_with(choose_scales(amax, q, axis, expansion), source, q, axis, draws) for expansion in (1, 1.5))
    better = squared_error(four, amax, q, axis) < squared_error(six, amax, q, axis)
    scales = Scales(torch.where(better, four.scales.codes, six.scales.codes), six.scales.groups)
    return round_with(scales, source, q, axis, draws)


def squared_error(rounded: Rounded, amax: Tensor, q: Quantizer, axis: int) -> Tensor:
    """Return the squared error of each block in units of 2^-32 of its squared amax, as an exact integer sum."""
    source, block = rounded.source, resolve_block(rounded.source, q, axis)
    y = restore(rounded.values, rounded.scales, q, axis, torch.float32)
    error = (source - y).abs() / spread(amax, block, source.shape)
    error = torch.where(error <= 1, error, 1)
    return fold((error.double() * 2**16).round().long().square(), block).sum((1, 3))


def ms_eden(source: Tensor, amax: Tensor, q: Quantizer, axis: int, seed: int) -> Rounded:
    """Round elements to nearest, then correct each block's scale and round it stochastically with its own draw.

    arXiv 2601.22813, algorithm 1, whose factor is ⟨x, x⟩ / ⟨x, rounded x⟩ of the rotated block.
    """
    nearest, e4m3 = round_with(choose_scales(amax, q, axis), source, q, axis, None), TWO_LEVELS["eden"].scales
    s8 = values_of(nearest.scales.codes, e4m3)
    poisoned = s8.isnan()
    corrected = torch.where(poisoned, 0, (s8 * correction(nearest, q, axis)).clamp(max=e4m3.max))
    drawn = round_to_grid(corrected, e4m3, uniform(amax.numel(), seed, amax.device).view(amax.shape))
    codes = torch.where(poisoned, NAN_CODES["eden"], codes_of(drawn, e4m3))
    scales = Scales(codes.to(torch.int32), nearest.scales.groups)
    return replace(nearest, scales=scales, values=without_lost_blocks(nearest.values, scales, q, axis))


def correction(rounded: Rounded, q: Quantizer, axis: int) -> Tensor:
    """Return Σ v² / Σ v·q of each block; the scaled v are integers in units of 2^-10, so no order changes the sums."""
    block = resolve_block(rounded.source, q, axis)
    v = scaled_by(rounded.scales, rounded.source, q, axis).abs().clamp(max=16)  # below 10, except in zeroed blocks
    units = (v.nan_to_num(0).double() * 2**10).round().long()
    halves = (rounded.values.nan_to_num(0).abs() * 2).long()
    squares, products = fold(units.square(), block).sum((1, 3)), fold(units * halves, block).sum((1, 3))
    return torch.where(products == 0, 1, squares.float() / (products.float() * 2**9))


def quantize(
    x: Tensor,
    q: Quantizer,
    axis: int,
    seed: int,
    *,
    out: Tensor | None = None,
    want_values: bool = True,
    want_stats: bool = False,
    partition: Part | None = None,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the quantized x in its dtype and, if requested, statistics: counts and amax of each part.

    want_values: False lets a backend skip writing values that nobody needs; this backend ignores it.
    partition: rows × columns of a part; None: the whole matrix is one part.
    skip: the parts of `out` that stay unchanged and are not counted.
    """
    rounded = round_matrix(x, q, axis, seed)
    y = restore(rounded.values, rounded.scales, q, axis, x.dtype)
    part = partition or (max(x.shape[0], 1), max(x.shape[1], 1))
    counts = count(rounded, y, part) if want_stats else None
    amax = largest(rounded.source, part) if want_stats else None
    out = torch.zeros_like(x) if out is None else out
    if skip is None:
        return out.copy_(y), counts, amax
    out.copy_(torch.where(spread(skip, part, x.shape), out, y))
    if counts is not None and amax is not None:
        counts, amax = counts.masked_fill(skip[..., None], 0), amax.masked_fill(skip, 0)
    return out, counts, amax


def count(rounded: Rounded, y: Tensor, part: Part) -> Tensor:
    """Count statistics as int64 [parts down, parts across, 7].

    The seven are: error in 2^-23, non-zeros, flushed, saturated, capped, non-finite, lost.
    """
    source, y = rounded.source, y.float()
    error = (source - y).abs() / source.abs()
    nonzero = source != 0
    capped = nonzero & (error > 1)
    error = torch.where(error <= 1, error, 1)  # a NaN counts as 1
    units = torch.where(nonzero, (error.double() * 2**23).round(), 0)
    flushed = nonzero & (y == 0)
    saturated = rounded.overflowed & (y != 0)
    each = (units, nonzero, flushed, saturated, capped, ~source.isfinite(), ~y.isfinite())
    return torch.stack([fold(counted.long(), part).sum((1, 3)) for counted in each], dim=-1)


def quantize_both(
    x: Tensor, row: Quantizer, column: Quantizer, row_seed: int, column_seed: int
) -> tuple[Tensor, Tensor]:
    """Quantize x along its rows (axis −1) by one quantizer, and down its columns (axis 0) by another."""
    return quantize(x, row, -1, row_seed)[0], quantize(x, column, 0, column_seed)[0]


def encode(x: Tensor, q: Quantizer, axis: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, block scales and float32 group scales; NaN blocks have codes 0.

    Block scales are float32 (amax) or bytes, and empty if there are none. packing.py defines the layout.
    """
    rounded = round_matrix(x, q, axis, seed)
    scales = rounded.scales
    codes = codes_of(rounded.values, q.format)
    if q.scaling == "none":
        if not q.format.has_nan and rounded.values.isnan().any():
            raise ValueError(f"{q.format} has no code for NaN: pass finite values, or add a scaling to {q}")
    else:
        poisoned = encode_factors(scales, q, axis).isnan()
        codes = torch.where(spread(poisoned, resolve_block(x, q, axis), x.shape), 0, codes)
    return pack(codes, q.format.bits), stored_scales(scales.codes, q), scales.groups


def decode(
    codes: Tensor, scales: Tensor, groups: Tensor, q: Quantizer, axis: int, cols: int, dtype: torch.dtype
) -> Tensor:
    """Return the values [rows, cols] that quantize() returns, from the tensors that encode() returned."""
    table = values_of(torch.arange(1 << q.format.bits, device=codes.device), q.format)
    values = table[unpack(codes, q.format.bits, cols)]  # a lookup is many times faster than computing each element
    return restore(values, Scales(scale_codes(scales), groups), q, axis, dtype)


def extent(x: Tensor, partition: Part) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest non-zero magnitude of each part; inf if a part has no non-zero."""
    magnitude = x.float().abs()
    magnitude_or_inf = torch.where(magnitude > 0, magnitude, math.inf)
    return largest(magnitude, partition), fold(magnitude_or_inf, partition, math.inf).amin((1, 3))


# Sampled weights


def exp2(t: Tensor) -> Tensor:
    """Return 2^t of float64 as float32: the nearest power of two times the Taylor polynomial of the rest."""
    n = t.round()
    x = (t - n) * math.log(2)
    polynomial = torch.zeros_like(x)
    for k in range(13, -1, -1):
        polynomial = polynomial * x + 1 / math.factorial(k)
    return (polynomial * power_of_two(n.clamp(-1000, 1000))).float()


def noise_scale(w: Tensor, bits: Tensor, block: int) -> Tensor:
    """Return 2^(1 − b) · max|w| of each square (GaussWS eq. 3)."""
    return exp2(1 - bits.double()) * largest(w.float(), (block, block))


def noise_like(w: Tensor, seed: int, noise: Noise) -> Tensor:
    size = w.numel()
    if noise == "gaussian":
        drawn = unpack_noise(gaussian_noise(size, seed, w.device), size)
    else:
        drawn = uniform_noise(size, seed, w.device)
    return drawn.float().view(w.shape)


def sample_weight(w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int, dtype: torch.dtype) -> Tensor:
    """Return w + R · 2^(1 − b) · max|w| (GaussWS eq. 3): w with noise as large as the error of quantizing to b bits."""
    scale = spread(noise_scale(w, bits, block), (block, block), w.shape)
    return (w.float() + noise_like(w, seed, noise) * scale).to(dtype)


def sample_weight_backward(grad: Tensor, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int) -> Tensor:
    """Return the gradient of b (GaussWS eq. 4): −ln 2 · s · Σ g·R over each square, in this order of additions."""
    products = fold(grad.float() * noise_like(w, seed, noise), (block, block))
    columns = torch.zeros_like(products[:, 0])
    for row in products.unbind(1):
        columns = columns + row
    columns = F.pad(columns, (0, block - columns.shape[-1]))
    while columns.shape[-1] > 1:
        left, right = columns.chunk(2, dim=-1)
        columns = left + right
    return (noise_scale(w, bits, block) * -math.log(2)) * columns.squeeze(-1)


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b in float32, where the product of two BF16 numbers is exact, so widening changes no bit."""
    return a.float() @ b.float()
