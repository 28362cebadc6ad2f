"""Compute stored scales from the amaxes of blocks, and values from stored scales (arithmetic.md, "Blocks and scales").

Scales are float32, and each operation is rounded once. `scalings.py` has the constants of each scaling.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.formats import Format
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.elements import codes_of, divide, round_to_grid, split, spread, values_of

FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN = 2.0**-126  # the smallest normal float32


@dataclass(frozen=True)
class Scales:
    """The stored scales, from which encoding and decoding both compute their factors, so that the factors agree."""

    codes: Tensor  # int32, one per block
    groups: Tensor  # float32: mantissas of groups (gam), d of arithmetic.md (two-level), zero points (affine), or empty


def ideal(amax: Tensor, grid: Format) -> Tensor:
    """Return the factor that maps amax to the largest value of the format `grid`; 1 for amax 0.

    The factor is limited to the range of normal float32 numbers.
    """
    return torch.where(amax == 0, 1, divide(grid.max, amax).clamp(FLT_MIN, FLT_MAX))


def group_amax(amax: Tensor, q: Quantizer, axis: int) -> Tensor:
    """Return the largest amax of each group of blocks (`Quantizer.group`); 0 for a group without blocks.

    amax: the largest magnitude of each block, [blocks down, blocks across]. The result broadcasts over this shape.
    """
    if q.group == "tensor":
        return F.pad(amax, (0, 1, 0, 1)).amax((0, 1), keepdim=True)
    if axis == -1:
        return F.pad(amax, (0, 1)).amax(1, keepdim=True)
    return F.pad(amax, (0, 0, 0, 1)).amax(0, keepdim=True)


def choose_scales(amax: Tensor, q: Quantizer, axis: int, expansion: float = 1.0) -> Scales:
    """Return the scales of blocks with these amaxes; the scale of a block with a non-finite amax is NaN.

    expansion: a factor by which the block scales of a two-level scaling are multiplied before they are rounded.
    """
    traits, stored, groups = q.traits, q.traits.stored, amax.new_empty(0)
    if stored is None:
        return Scales(torch.zeros_like(amax, dtype=torch.int32), groups)
    poisoned = ~amax.isfinite()
    amax = torch.where(poisoned, 0, amax)
    match traits.kind:
        case "float":
            codes = ideal(amax, q.format).view(torch.int32)
        case "mantissa":  # MoR, algorithm 1
            group_mantissa, group_exponent = split(ideal(group_amax(amax, q, axis), q.format))
            mantissa, exponent = split(ideal(amax, q.format))
            exponent = exponent - (mantissa < group_mantissa).int()  # one binade lower, or the block would saturate
            codes = torch.where(amax == 0, group_exponent, exponent) + 127
            groups = group_mantissa.float().flatten()
        case "power":
            mantissa, exponent = split(amax)
            max_mantissa, max_exponent = split(torch.full_like(amax, q.format.max))
            exponent = max_exponent - exponent
            if traits.rounding == "up":
                exponent = exponent - (mantissa > max_mantissa).int()
            codes = 127 - torch.where(amax == 0, 0, exponent.clamp(-127, 127))
        case "two-level":  # NVFP4 eqs. 1-3, in TransformerEngine's order of operations
            tensor_amax = group_amax(amax, q, axis)
            top = torch.full_like(tensor_amax, traits.top or q.format.max)
            g = torch.where(tensor_amax == 0, 1, (top * traits.target / tensor_amax).clamp(max=FLT_MAX))
            s8 = (amax * (g * divide(1, top)) * expansion).clamp(max=stored.max)
            codes = codes_of(round_to_grid(s8, stored), stored)
            groups = divide(1, g).flatten()
    return Scales(torch.where(poisoned, stored.code_of(math.nan), codes).to(torch.int32), groups)


def group_grid(scales: Scales, axis: int) -> Tensor:
    """Return `scales.groups`, one number for each group, in a shape that broadcasts over [blocks down, blocks across].

    A group is the whole matrix, or a row of blocks (axis −1) or a column of blocks (axis 0).
    """
    return scales.groups.unsqueeze(1 if axis == -1 else 0)


def stored_values(scales: Scales, q: Quantizer) -> Tensor:
    """Return the float32 values of the block scales alone, not combined with the numbers that groups share.

    The value is NaN for a block that contains NaN or inf. For the scaling `none`, all values are 1.
    """
    codes, stored = scales.codes, q.traits.stored
    if stored is None:
        return torch.ones_like(codes, dtype=torch.float32)
    return codes.view(torch.float32) if q.traits.kind in ("float", "affine") else values_of(codes, stored)


def encode_factors(scales: Scales, q: Quantizer, axis: int) -> Tensor:
    """Return the factor by which each block is multiplied before rounding.

    The factor is NaN for a block that contains NaN or inf. For the scaling `none`, all factors are 1.
    """
    block = stored_values(scales, q)
    match q.traits.kind:
        case "mantissa":
            return (group_grid(scales, axis) * block.double()).float()
        case "power":
            return divide(1, block)
        case "two-level":
            return divide(1, block * group_grid(scales, axis)).clamp(max=FLT_MAX)
    return block


def restore(values: Tensor, scales: Scales, q: Quantizer, axis: int, dtype: torch.dtype) -> Tensor:
    """Return rounded values scaled back to the range of the source, limited to the range of `dtype` and cast to it.

    values: values of the quantizer's format, to which the scaled source was rounded.
    """
    block, shape = q.block.resolve(values.shape, axis), values.shape
    match q.traits.kind:
        case "none":
            y = values
        case "float" | "mantissa":
            y = values / spread(encode_factors(scales, q, axis), block, shape)
        case "power":
            y = values * spread(stored_values(scales, q), block, shape)
        case "affine":
            step, zero = stored_values(scales, q), scales.groups.view_as(scales.codes)
            y = (values / q.format.min_subnormal - spread(zero, block, shape)) * spread(step, block, shape)
        case "two-level":
            s8 = spread(stored_values(scales, q), block, shape)
            y = torch.where(s8 == 0, torch.copysign(s8, values), values * s8 * group_grid(scales, axis))
    limit = torch.finfo(dtype).max
    return torch.where(values.isinf(), y, y.clamp(-limit, limit)).to(dtype)  # an overflow to inf stays inf
