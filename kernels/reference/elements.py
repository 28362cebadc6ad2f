"""Define the arithmetic of elements: bits, rounding to a format, codes (arithmetic.md, "Elements"); parts of a matrix.

The grid of a format is the set of its values; arguments named `grid` are the format itself. Rounding happens in
float64, where dividing a float32 by a power of two, and subtracting the nearest integer, are exact. Powers of two and
exponents are built from bits, because exp2, log2 and ldexp do not guarantee the last bit.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.formats import Format


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float64, built from its bits."""
    return (exponent.long() + 1023 << 52).view(torch.float64)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mantissa, exponent): x = mantissa · 2^exponent with 1 ≤ |mantissa| < 2; the exponent of 0 is -1022."""
    half, exponent = torch.frexp(x.double())
    return half * 2, torch.where(x == 0, -1022, exponent - 1)


def divide(dividend: float, x: Tensor) -> Tensor:
    """Return dividend / x by one division; for a Python number / x, torch might multiply by a reciprocal instead."""
    return torch.full_like(x, dividend) / x


def round_to_grid(v: Tensor, grid: Format, draws: Tensor | None = None) -> Tensor:
    """Return v rounded to values of the format `grid`, in float64, as if the format had no largest value.

    draws: for stochastic rounding, a uniform number in [0, 1) for each element; None: round to nearest, ties to even.
    """
    exponent = split(v)[1].clamp(grid.emin, 127)
    step = power_of_two(exponent - grid.mantissa_bits)
    steps = v.double() / step
    rounded = steps.round()  # ties to even
    if draws is not None:
        difference = steps - rounded
        rounded = torch.where(draws < difference.abs(), rounded + difference.sign(), rounded)
    return torch.copysign(rounded * step, v.double())


def codes_of(values: Tensor, grid: Format) -> Tensor:
    """Return the codes of `values`, which are values of the format `grid`, as int32.

    A code is the sign bit, and below it the number of smaller magnitudes in the format. The codes equal those of
    Format.code_of, except that NaN has no sign. The format must have a zero, unlike e8m0.
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
    """Return the float32 values that the codes have in the format `grid`."""
    magnitude_bits = grid.exponent_bits + grid.mantissa_bits
    magnitude = codes.long() & (1 << magnitude_bits) - 1
    field, fraction = magnitude >> grid.mantissa_bits, magnitude & (1 << grid.mantissa_bits) - 1
    subnormal = (field == 0) & grid.has_zero
    steps = fraction + ((~subnormal).long() << grid.mantissa_bits)
    values = steps * power_of_two(field + subnormal.long() - grid.bias - grid.mantissa_bits)
    values = torch.where(magnitude > grid.max_code, math.nan, values)
    if grid.has_inf:
        values = torch.where(magnitude == grid.code_of(math.inf, "inf"), math.inf, values)
    negative = codes.long() >> magnitude_bits & 1
    return torch.where(negative == 1, -values, values).float()


Part = tuple[int, int]  # rows and columns of a part


def fold(x: Tensor, part: Part, fill: float = 0) -> Tensor:
    """Reshape [rows, cols] to [parts down, rows of a part, parts across, columns of a part]; pad edges with `fill`."""
    r, c = (min(size, max(n, 1)) for size, n in zip(part, x.shape, strict=True))
    padded = F.pad(x, (0, -x.shape[1] % c, 0, -x.shape[0] % r), value=fill)
    return padded.reshape(padded.shape[0] // r, r, padded.shape[1] // c, c)


def spread(grid: Tensor, part: Part, shape: Sequence[int]) -> Tensor:
    """Expand `grid`, one value per part, to a matrix of this shape: each element gets the value of its part."""
    row, column = (torch.arange(n, device=grid.device) // size for n, size in zip(shape, part, strict=True))
    return grid[row[:, None], column]


def largest(x: Tensor, part: Part) -> Tensor:
    """Return the largest magnitude in each part of a float32 matrix, compared as bits: finite < inf < NaN."""
    magnitudes = x.view(torch.int32) & 0x7FFFFFFF
    return fold(magnitudes, part).amax((1, 3)).view(torch.float32)
