"""Compute stored scales from the amaxes of blocks, and values from stored scales (arithmetic.md, "Blocks and scales").

Scales are float32, and each operation is rounded once. `scalings.py` has the constants of each scaling.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.formats import Format
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.elements import codes_of, divide, fold, round_to_grid, split, spread, values_of

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
    """Return the largest amax of each group of blocks, [groups down, groups across]; 0 for a group without blocks.

    amax: the largest magnitude of each block, [blocks down, blocks across].
    """
    if q.group == "tensor":
        return F.pad(amax, (0, 1, 0, 1)).amax((0, 1), keepdim=True)
    if q.group != "row":
        return fold(amax, (1, q.group_blocks) if axis == -1 else (q.group_blocks, 1)).amax((1, 3))
    if axis == -1:
        return F.pad(amax, (0, 1)).amax(1, keepdim=True)
    return F.pad(amax, (0, 0, 0, 1)).amax(0, keepdim=True)


def over_blocks(groups: Tensor, q: Quantizer, grid: Sequence[int], axis: int) -> Tensor:
    """Expand one number per group, [groups down, groups across], to a grid of (blocks down, blocks across)."""
    n = min(q.group_blocks or max(grid), max(*grid, 1))
    part = (1, n) if axis == -1 else (n, 1)
    return groups.expand(tuple(grid)) if q.group == "tensor" else spread(groups, part, grid)


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
            own_mantissa, own_exponent = split(ideal(group_amax(amax, q, axis), q.format))
            group_mantissa, group_exponent = (
                over_blocks(own, q, amax.shape, axis) for own in (own_mantissa, own_exponent)
            )
            mantissa, exponent = split(ideal(amax, q.format))
            exponent = exponent - (mantissa < group_mantissa).int()  # one binade lower, or the block would saturate
            codes = torch.where(amax == 0, group_exponent, exponent) + 127
            groups = own_mantissa.float().flatten()
        case "power":
            mantissa, exponent = split(amax)
            max_mantissa, max_exponent = split(torch.full_like(amax, q.format.max))
            exponent = max_exponent - exponent
            if traits.rounding == "up":
                exponent = exponent - (mantissa > max_mantissa).int()
            codes = 127 - torch.where(amax == 0, 0, exponent.clamp(-127, 127))
        case "two-level":  # NVFP4 eqs. 1-3, in TransformerEngine's order of operations
            tensor_amax = group_amax(amax, q, axis)
            top = torch.full_like(tensor_amax, (traits.top or q.format.max) * traits.factor)
            g = torch.where(tensor_amax == 0, 1, (top * traits.target / tensor_amax).clamp(max=FLT_MAX))
            if traits.select is None:
                s8 = amax * over_blocks(g * divide(1, top), q, amax.shape, axis)
            else:  # in the order of Four Over Six's authors
                s8 = amax / over_blocks(top, q, amax.shape, axis) * over_blocks(g, q, amax.shape, axis)
            s8 = (s8 * expansion).clamp(max=stored.max)
            codes = codes_of(round_to_grid(s8, stored), stored)
            groups = divide(1, g).flatten()
    return Scales(torch.where(poisoned, stored.code_of(math.nan), codes).to(torch.int32), groups)


def group_values(scales: Scales, q: Quantizer, axis: int) -> Tensor:
    """Return the number in `scales.groups` that belongs to each block, [blocks down, blocks across]."""
    grid = scales.codes.shape
    return over_blocks(scales.groups.view(q.group_grid((grid[0], grid[1]), axis)), q, grid, axis)


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
            return (group_values(scales, q, axis) * block.double()).float()
        case "power":
            return divide(1, block) * torch.full_like(block, q.factor)
        case "two-level":
            return divide(1, block * group_values(scales, q, axis)).clamp(max=FLT_MAX)
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
            y = values * spread(stored_values(scales, q), block, shape) * divide(1, torch.full_like(values, q.factor))
        case "affine":
            step, zero = stored_values(scales, q), scales.groups.view_as(scales.codes)
            y = (values / q.format.min_subnormal - spread(zero, block, shape)) * spread(step, block, shape)
        case "two-level":
            s8 = spread(stored_values(scales, q), block, shape)
            d = spread(group_values(scales, q, axis), block, shape)
            y = torch.where(s8 == 0, torch.copysign(s8, values), values * s8 * d)
    limit = torch.finfo(dtype).max
    return torch.where(values.isinf(), y, y.clamp(-limit, limit)).to(dtype)  # an overflow to inf stays inf
