"""Define how a matrix is scaled block by block and rounded to the values of a format, for every scaling.

source ──largest──> amax per block ──choose_scales──> Scales ──encode_factors──> s
source · s ──round_to_grid──> grid values, from which `restore` computes values, and `codes_of` codes

The source is the matrix after its rotation, if there is one. Each arrow contains the name of the function that computes
its right side from its left side. The Scales are stored in encoded tensors; s are the encode factors, by which elements
are multiplied before rounding. Grid values are values of the quantizer's format.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.elements import Part, codes_of, fold, largest, round_to_grid, spread
from fewbits.kernels.reference.noise import uniform
from fewbits.kernels.reference.rotation import rotate
from fewbits.kernels.reference.scales import Scales, choose_scales, encode_factors, restore, stored_values
from fewbits.kernels.scalings import Select


@dataclass(frozen=True)
class Rounded:
    """A matrix that was scaled and rounded to values of the quantizer's format, with its source and scales."""

    source: Tensor  # the rotated matrix in float32
    scales: Scales
    values: Tensor  # values of the format, in float32: the source scaled and rounded
    overflowed: Tensor  # True where rounding exceeded the format's maximum


def round_matrix(x: Tensor, q: Quantizer, axis: int, seed: int) -> Rounded:
    source = rotate(x, q, axis).float()
    amax = largest(source, q.block.resolve(x.shape, axis))
    draws = uniform(x.numel(), seed, x.device).view(x.shape) if q.rounding == "stochastic" else None
    if q.traits.kind == "affine":
        return affine(source, q, axis, draws)
    if q.traits.compares:
        return four_over_six(source, amax, q, axis, draws)
    if q.traits.corrects:
        return ms_eden(source, amax, q, axis, seed)
    return round_with(choose_scales(amax, q, axis), source, q, axis, draws)


def scaled_by(scales: Scales, source: Tensor, q: Quantizer, axis: int) -> Tensor:
    return source * spread(encode_factors(scales, q, axis), q.block.resolve(source.shape, axis), source.shape)


def round_with(scales: Scales, source: Tensor, q: Quantizer, axis: int, draws: Tensor | None) -> Rounded:
    scaled = scaled_by(scales, source, q, axis)
    rounded = round_to_grid(scaled, q.format, draws)
    overflowed = source.isfinite() & (rounded.abs() > q.format.max)
    beyond = {"saturate": q.format.max, "nan": math.nan, "inf": math.inf}[q.overflow]
    values = torch.where(overflowed, torch.copysign(torch.full_like(rounded, beyond), rounded), rounded)
    if not q.format.has_inf:  # a remaining infinity comes from the source itself, with scaling none
        values = torch.where(values.isinf(), math.nan, values)
    if q.traits.kind == "two-level":
        values = without_lost_blocks(values, scales, q, axis)
    return Rounded(source, scales, values.float(), overflowed)


def affine(source: Tensor, q: Quantizer, axis: int, draws: Tensor | None) -> Rounded:
    """Map the range of each block, which includes 0, to all integers of the format, by a step and a zero point."""
    block, unit = q.block.resolve(source.shape, axis), q.format.min_subnormal
    folded, largest_integer = fold(source, block), q.format.max / unit
    low, high = folded.amin((1, 3)).clamp(max=0).double(), folded.amax((1, 3)).clamp(min=0).double()
    step = ((high - low) / (2 * largest_integer)).float()
    step = torch.where(step == 0, 1, torch.where(step.isfinite(), step, math.nan))
    zero = (-largest_integer - low / step.double()).round().clamp(-largest_integer, largest_integer)
    zero = torch.where(low == high, 0, zero)
    scaled = source.double() / spread(step.double(), block, source.shape) + spread(zero, block, source.shape)
    rounded = round_to_grid(scaled * unit, q.format, draws)
    overflowed = source.isfinite() & (rounded.abs() > q.format.max)
    values = rounded.clamp(-q.format.max, q.format.max).float()
    return Rounded(source, Scales(step.view(torch.int32), zero.float().flatten()), values, overflowed)


def without_lost_blocks(values: Tensor, scales: Scales, q: Quantizer, axis: int) -> Tensor:
    """Return `values` with those in blocks whose scale is 0 replaced by zeros of the same signs.

    values: values of the quantizer's format, to which the scaled source was rounded.
    """
    lost = spread(scales.codes == 0, q.block.resolve(values.shape, axis), values.shape)
    return torch.where(lost, torch.zeros_like(values).copysign(values), values)


def four_over_six(source: Tensor, amax: Tensor, q: Quantizer, axis: int, draws: Tensor | None) -> Rounded:
    """Quantize each block with its largest magnitude mapped to 6, or to 4 if this gives a smaller error.

    source: the matrix after its rotation. amax: the largest magnitude of each block. draws: a random number in [0, 1)
    for each element, for stochastic rounding; None: round to nearest.
    """
    expansions = (1.0, q.traits.expansion)
    six, four = (round_with(choose_scales(amax, q, axis, by), source, q, axis, draws) for by in expansions)
    better = block_error(four, amax, q, axis) < block_error(six, amax, q, axis)
    scales = Scales(torch.where(better, four.scales.codes, six.scales.codes), six.scales.groups)
    return round_with(scales, source, q, axis, draws)


def block_error(rounded: Rounded, amax: Tensor, q: Quantizer, axis: int) -> Tensor:
    """Return the error of each block's values, by which `select` compares: exact sums or maxima of integers."""
    y = restore(rounded.values, rounded.scales, q, axis, torch.float32)
    block = q.block.resolve(rounded.source.shape, axis)
    return measured_error(rounded.source, y, amax, block, q.traits.select or "mse")


def measured_error(source: Tensor, y: Tensor, amax: Tensor, part: Part, select: Select) -> Tensor:
    """Return the sum of squares (mse), the sum (mae) or the maximum of |source − y| / amax over each part.

    Each |source − y| / amax is limited to 1 and rounded to a multiple of 2^-16 (mse) or 2^-23. The result is in units
    of 2^-32 (mse) or 2^-23. amax: one per part.
    """
    error = (source - y).abs() / spread(amax, part, source.shape)
    error = torch.where(error <= 1, error, 1)
    units = fold((error.double() * 2.0 ** (16 if select == "mse" else 23)).round().long(), part)
    if select == "max":
        return units.amax((1, 3))
    return (units.square() if select == "mse" else units).sum((1, 3))


def ms_eden(source: Tensor, amax: Tensor, q: Quantizer, axis: int, seed: int) -> Rounded:
    """Round elements to nearest, then correct each block's scale and round the scale stochastically.

    This is algorithm 1 of arXiv 2601.22813. It corrects the scale by the factor ⟨x, x⟩ / ⟨x, rounded x⟩, in which x is
    the rotated block.
    """
    stored = q.traits.stored
    assert stored is not None
    nearest = round_with(choose_scales(amax, q, axis), source, q, axis, None)
    s8 = stored_values(nearest.scales, q)
    corrected = (s8 * correction(nearest, q, axis)).clamp(max=stored.max)
    drawn = round_to_grid(corrected, stored, uniform(amax.numel(), seed, amax.device).view(amax.shape))
    scales = Scales(codes_of(torch.where(s8.isnan(), s8, drawn), stored), nearest.scales.groups)
    return replace(nearest, scales=scales, values=without_lost_blocks(nearest.values, scales, q, axis))


def correction(rounded: Rounded, q: Quantizer, axis: int) -> Tensor:
    """Return Σ v² / Σ v·g for each block: v is the scaled magnitude of an element, g is v rounded to the format.

    Each v is first rounded to a multiple of 2^-10, so that the sums are exact. If Σ v·g is 0, the result is 1.
    """
    block = q.block.resolve(rounded.source.shape, axis)
    v = scaled_by(rounded.scales, rounded.source, q, axis).abs().clamp(max=16)  # below 10, except in zeroed blocks
    units = (v.nan_to_num(0).double() * 2**10).round().long()
    halves = (rounded.values.nan_to_num(0).abs() * 2).long()
    squares, products = fold(units.square(), block).sum((1, 3)), fold(units * halves, block).sum((1, 3))
    return torch.where(products == 0, 1, squares.float() / (products.float() * 2**9))
