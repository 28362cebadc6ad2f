"""Define in plain torch the arithmetic of kernels that every backend follows to the bit.

The code follows arithmetic.md and uses its terms, so that it can be compared with the papers. It is
written for clarity, not speed: it computes on whole matrices and has one rounding per line. This module contains the
functions that every backend provides; they use the modules of `reference/`.
"""

import math

import torch
from torch import Tensor

from fewbits.kernels.backends.protocol import (
    ABSENT,
    BINS,
    CHOICES,
    COUNTS,
    ERROR,
    ERROR_ONE,
    ERRORS,
    LARGEST,
    LOST,
    MEAN_ONE,
    NONZEROS,
    OBSERVED,
    OperandOf,
    Part,
    Stored,
)
from fewbits.kernels.packing import operand_scales, pack, scale_codes, stored_scales, unpack
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.elements import codes_of, fold, largest, spread, values_of
from fewbits.kernels.reference.noise import gaussian_noise, uniform_noise
from fewbits.kernels.reference.rotation import rotate
from fewbits.kernels.reference.rounding import Rounded, measured_error, round_matrix
from fewbits.kernels.reference.scales import Scales, restore, stored_values
from fewbits.kernels.reference.weights import sample_weight, sample_weight_backward
from fewbits.kernels.scalings import Select

__all__ = [
    "compare",
    "decide",
    "decode",
    "encode",
    "encode_operands",
    "extent",
    "gaussian_noise",
    "matmul_fp32",
    "name",
    "never_waits",
    "observe",
    "quantize",
    "quantize_both",
    "rotate",
    "sample_weight",
    "sample_weight_backward",
    "uniform_noise",
]

name = "reference"
never_waits = False


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
) -> tuple[Tensor, Tensor, Tensor]:
    rounded = round_matrix(x, q, axis, seed)
    y = restore(rounded.values, rounded.scales, q, axis, x.dtype)
    part = partition or (max(x.shape[0], 1), max(x.shape[1], 1))
    counts, amax = (count(rounded, y, part), largest(rounded.source, part)) if want_stats else (ABSENT, ABSENT)
    out = torch.zeros_like(x) if out is None else out
    if skip is None:
        return out.copy_(y), counts, amax
    out.copy_(torch.where(spread(skip, part, x.shape), out, y))
    if want_stats:
        counts, amax = counts.masked_fill(skip[..., None], 0), amax.masked_fill(skip, 0)
    return out, counts, amax


def count(rounded: Rounded, y: Tensor, part: Part) -> Tensor:
    """Return the seven statistics of protocol.py for each part, as int64 [parts down, parts across, 7].

    rounded: the result of `round_matrix`. y: the values that the quantizer returns, in the dtype of the input.
    """
    source, y = rounded.source, y.float()
    error = (source - y).abs() / source.abs()
    nonzero = source != 0
    capped = nonzero & (error > 1)
    error = torch.where(error <= 1, error, 1)  # a NaN counts as 1
    units = torch.where(nonzero, (error.double() * ERROR_ONE).round(), 0)
    flushed = nonzero & (y == 0)
    saturated = rounded.overflowed & (y != 0)
    each = (units, nonzero, flushed, saturated, capped, ~source.isfinite(), ~y.isfinite())
    return torch.stack([fold(counted.long(), part).sum((1, 3)) for counted in each], dim=-1)


def quantize_both(
    x: Tensor,
    row: Quantizer,
    column: Quantizer,
    row_seed: int,
    column_seed: int,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    along, down = (None, None) if out is None else out
    return quantize(x, row, -1, row_seed, out=along)[0], quantize(x, column, 0, column_seed, out=down)[0]


def encode(x: Tensor, q: Quantizer, axis: int, seed: int) -> Stored:
    codes, scales, groups = _codes_and_scales(x, q, axis, seed)
    return pack(codes, q.format.bits), scales, groups


def encode_operands(x: Tensor, *of: OperandOf) -> tuple[Stored, ...]:
    return tuple(_operand(x, *each) for each in of)


def _operand(x: Tensor, q: Quantizer, axis: int, seed: int) -> Stored:
    codes, scales, groups = _codes_and_scales(x, q, axis, seed)
    lines = codes if axis == -1 else codes.t()
    return pack(lines, q.format.bits), operand_scales(scales, q, axis, x.shape), groups


def _codes_and_scales(x: Tensor, q: Quantizer, axis: int, seed: int) -> Stored:
    """Return the codes [rows, cols] as int32, and block scales and group scales as in packed storage."""
    rounded = round_matrix(x, q, axis, seed)
    scales = rounded.scales
    poisoned = spread(stored_values(scales, q).isnan(), q.block.resolve(x.shape, axis), x.shape)
    codes = torch.where(poisoned, 0, codes_of(rounded.values, q.format))
    return codes, stored_scales(scales.codes, q), scales.groups


def decode(
    codes: Tensor,
    scales: Tensor,
    groups: Tensor,
    q: Quantizer,
    axis: int,
    cols: int,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    table = values_of(torch.arange(1 << q.format.bits, device=codes.device), q.format)
    values = table[unpack(codes, q.format.bits, cols)]  # a lookup is many times faster than computing each element
    restored = restore(values, Scales(scale_codes(scales), groups), q, axis, dtype)
    return restored if out is None else out.copy_(restored)


def decide(
    index: int,
    last: int,
    counts: Tensor,
    choice: Tensor,
    decided: Tensor,
    *,
    limit: float = 0.0,
    other: Tensor = ABSENT,
    extent: tuple[Tensor, Tensor] = (ABSENT, ABSENT),
) -> bool:
    largest, smallest = extent
    error = counts[..., ERROR]
    if largest is not ABSENT:
        passed = (largest / smallest).double() < limit
    elif other is not ABSENT:
        passed = (error < other[..., ERROR]) | (error == 0)
    else:
        passed = (error < counts[..., NONZEROS].double() * limit) | (error == 0)
    if index == 0:
        choice.fill_(last)
        decided.fill_(False)
    accepted = ~decided & (counts[..., LOST] == 0) & passed
    choice.masked_fill_(accepted, index)
    decided |= accepted
    return not bool(decided.all())


def compare(source: Tensor, mine: Tensor, other: Tensor, partition: Part, by: Select) -> Tensor:
    source, amax = source.float(), largest(source.float(), partition)
    one, its = (measured_error(source, y.float(), amax, partition, by) for y in (mine, other))
    return one >= its


def observe(table: Tensor, counts: list[Tensor], choices: list[Tensor], rows: list[int]) -> None:
    index, first = torch.tensor(rows, device=table.device), torch.arange(3, device=table.device)
    sums = torch.stack([each.reshape(-1, COUNTS).sum(0) for each in counts])
    choices = [choice.to(table.device) for choice in choices]
    chosen = torch.stack([torch.cat(((c.reshape(-1, 1) == first).sum(0), (c > 2).sum().view(1))) for c in choices])
    errors = sums[:, ERROR].double() / ERROR_ONE / sums[:, NONZEROS].clamp(min=1)
    bins = ((errors[:, None] >= torch.arange(21, device=table.device).double() * 0.005).sum(1) - 1)[:, None]
    added = torch.zeros(len(rows), OBSERVED, dtype=torch.int64, device=table.device)
    added[:, :COUNTS], added[:, CHOICES], added[:, ERRORS] = sums, chosen, (errors * MEAN_ONE).round().long()
    added[:, BINS].scatter_(1, bins, 1)
    table.index_add_(0, index, added)
    # The bits of doubles that are not negative have the order of the numbers.
    table[:, LARGEST].scatter_reduce_(0, index, errors.view(torch.int64), "amax")


def extent(x: Tensor, partition: Part) -> tuple[Tensor, Tensor]:
    magnitude = x.float().abs()
    magnitude_or_inf = torch.where(magnitude > 0, magnitude, math.inf)
    return largest(magnitude, partition), fold(magnitude_or_inf, partition, math.inf).amin((1, 3))


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b of the operands widened to float32, in which the product of two BF16 numbers is exact."""
    return a.float() @ b.float()
