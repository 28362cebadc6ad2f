"""Measure the errors of matrix products whose accumulators have few bits, for several numbers K of summed products."""

from __future__ import annotations

from functools import cache

import torch

from fewbits.kernels.accumulators import product
from fewbits.kernels.formats import TABLE
from fewbits.kernels.reference.accumulators import sum_in_format

LENGTHS = (128, 512, 1024, 4096)  # values of K
SIDE = 48  # the result of a product is a matrix of SIDE × SIDE sums
FEW = 16  # used instead of SIDE in `in_format`, whose sums are slow because they are not compiled
OPERANDS = {"fp32": torch.float16, "fp16": torch.float16, "bf16": torch.bfloat16}
SUMS = ("fp32", "fp16", "bf16", "hopper-fp8", "hopper-fp8-promoted", "blackwell-fp8")


@cache
def errors(accumulator: str, distribution: str, length: int) -> tuple[float, float]:
    """Return the mean relative error of a product's rows, and half the width of the mean's 95 % interval.

    The operands have shapes (SIDE, K) and (K, SIDE) with K = length. A row's error is RMS(result - exact) / RMS(exact)
    over its elements. The exact product has the same rounded operands, so that only the sums differ.
    accumulator: one of SUMS. distribution: uniform (from 0 to 1) or normal.
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
    """Return the largest |result - exact| of all elements of a matrix product, divided by RMS(exact).

    The operands have shapes (SIDE, K) and (K, SIDE) with K = length. The exact product has the same rounded operands.
    accumulator: one of SUMS. distribution: uniform (from 0 to 1) or normal.
    """
    drawn = torch.Generator().manual_seed(length)
    dtype = OPERANDS.get(accumulator, torch.float8_e4m3fn)
    draw = torch.rand if distribution == "uniform" else torch.randn
    a, b = draw(SIDE, length, generator=drawn).to(dtype), draw(length, SIDE, generator=drawn).to(dtype)
    exact = a.double() @ b.double()
    off = (product(a, b, accumulator).double() - exact).abs() / exact.square().mean().sqrt()
    return float(off.max())


def in_format(name: str, length: int) -> float:
    """Return ‖result - exact‖ / ‖exact‖ of a product whose partial sums are rounded to the format with this name.

    Operands are E4M3 numbers from 0 to 1; each sum has `length` products.
    """
    drawn = torch.Generator().manual_seed(length)
    a, b = (torch.rand(s, generator=drawn).to(torch.float8_e4m3fn).float() for s in ((FEW, length), (length, FEW)))
    exact = a.double() @ b.double()
    return float((sum_in_format(a, b, TABLE[name]).double() - exact).norm() / exact.norm())
