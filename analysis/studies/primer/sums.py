"""Measure what accumulators of few bits cost, against the length K of the sum."""

from __future__ import annotations

from functools import cache

import torch

from fewbits.kernels.accumulators import product
from fewbits.kernels.formats import TABLE
from fewbits.kernels.reference.accumulators import sum_in_format

LENGTHS = (128, 512, 1024, 4096)
SIDE = 48  # SIDE² products for each length
FEW = 16  # as SIDE, for sums that are not compiled
OPERANDS = {"fp32": torch.float16, "fp16": torch.float16, "bf16": torch.bfloat16}
SUMS = ("fp32", "fp16", "bf16", "hopper-fp8", "hopper-fp8-promoted", "blackwell-fp8")


@cache
def errors(accumulator: str, distribution: str, length: int) -> tuple[float, float]:
    """Return the mean relative error of a product and its 95 % half-width over the rows of the left operand.

    The error of a row is the root mean square error of its elements over the root mean square of the exact ones.
    Operands are rounded to their dtype first, so that only the sums differ.
    """
    drawn = torch.Generator().manual_seed(length)
    dtype = OPERANDS.get(accumulator, torch.float8_e4m3fn)
    draw = torch.rand if distribution == "uniform" else torch.randn
    a, b = draw(SIDE, length, generator=drawn).to(dtype), draw(length, SIDE, generator=drawn).to(dtype)
    exact = a.double() @ b.double()
    off = product(a, b, accumulator).double() - exact
    rows = (off.square().mean(1) / exact.square().mean(1)).sqrt()
    return float(rows.mean()), float(1.96 * rows.std() / SIDE**0.5)


@cache
def largest(accumulator: str, distribution: str, length: int) -> float:
    """Return the largest relative error of an element whose exact value is not small."""
    drawn = torch.Generator().manual_seed(length)
    dtype = OPERANDS.get(accumulator, torch.float8_e4m3fn)
    draw = torch.rand if distribution == "uniform" else torch.randn
    a, b = draw(SIDE, length, generator=drawn).to(dtype), draw(length, SIDE, generator=drawn).to(dtype)
    exact = a.double() @ b.double()
    off = (product(a, b, accumulator).double() - exact).abs() / exact.square().mean().sqrt()
    return float(off.max())


def in_format(name: str, length: int) -> float:
    """Return the relative error of sums of products of uniform E4M3 numbers, each sum rounded to a format."""
    drawn = torch.Generator().manual_seed(length)
    a, b = (torch.rand(s, generator=drawn).to(torch.float8_e4m3fn).float() for s in ((FEW, length), (length, FEW)))
    exact = a.double() @ b.double()
    return float((sum_in_format(a, b, TABLE[name]).double() - exact).norm() / exact.norm())
