"""Compute what the primer's two texts state about formats, casts and integer codes, with the kernels of fewbits.

001 and 002 are the two texts (analysis/studies/primer/paper.yaml).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE
from fewbits.kernels.number import INTEGERS

DRAWN = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "fp16", "bf16", "e8m0", "int4", "int8")

# The three tables of 002, as printed: the FP32 inputs and, by format, the results.
LOSS_OF_PRECISION = {
    "fp32": (-1.51039, 0.412776, -0.348471, -1.17588),
    "bf16": (-1.50781, 0.412109, -0.347656, -1.17969),
    "fp16": (-1.51074, 0.412842, -0.348389, -1.17578),
    "e4m3": (-1.5, 0.40625, -0.34375, -1.125),
}
OVERFLOW = {"fp32": (2438.37, -440.6, 857.116, 129.765), "e4m3": (math.nan, -448.0, math.nan, 128.0)}
UNDERFLOW = {
    "fp32": (0.000719602, -0.000107368, 0.000573265, 0.00208493),
    "e4m3": (0.0, -0.0, 0.0, 0.00195312),
}
TABLES = {"loss of precision": LOSS_OF_PRECISION, "overflow": OVERFLOW, "underflow": UNDERFLOW}


@dataclass(frozen=True)
class Grid:
    """The positive values of a format in ascending order."""

    subnormal: np.ndarray
    normal: np.ndarray
    per_binade: int  # the largest number of values in a binade, from 2^k to 2^(k + 1)


@cache
def grid(name: str) -> Grid:
    """Return the positive values of a format, without a scale.

    name: a floating-point format (a key of kernels.formats.TABLE) or an integer format (a key of
    kernels.number.INTEGERS, such as int8).
    """
    if name in INTEGERS:
        bits, step = INTEGERS[name]
        return Grid(np.empty(0), np.arange(1, 1 << bits - 1) * step, 1 << bits - 2)
    f = TABLE[name]
    finite = np.array([f.decode(code) for code in range(f.max_code + 1)])
    positive = finite[finite > 0]
    return Grid(positive[positive < f.min_normal], positive[positive >= f.min_normal], 1 << f.mantissa_bits)


def cast(values: tuple[float, ...], name: str, overflow: str = "saturate") -> tuple[float, ...]:
    """Return the values cast to the format with this name by our kernels, without scales.

    overflow: saturate, nan or inf, the result for values beyond the range.
    """
    option = f":overflow={overflow}" if overflow != "saturate" else ""
    return tuple(fake_quantize(torch.tensor(values), f"{name}{option}").tolist())


def as_printed(value: float) -> str:
    """Return a number as text with six significant digits, as in the tables of the primer's text 002."""
    return f"{value:.6g}"


def compared() -> list[tuple[str, str, str, str]]:
    """Return (table, format, printed number, our number) for each entry of the three tables of casts in text 002.

    Text 002 is one of the two texts that the primer checks. In its table of overflow, numbers beyond a format's range
    become NaN; our casts use the same rule there.
    """
    rows = []
    for table, lines in TABLES.items():
        for name, printed in lines.items():
            if name == "fp32":
                continue
            ours = cast(lines["fp32"], name, "nan" if table == "overflow" else "saturate")
            rows += [(table, name, as_printed(a), as_printed(b)) for a, b in zip(printed, ours, strict=True)]
    return rows


def largest_rounding_error(name: str, mode: str) -> float:
    """Return the largest error of rounding to a format, over eight numbers in each step between normal values.

    The unit of the error is the step between neighbouring values of the format in the binade of the rounded number.
    mode: nearest, or truncated (rounding down, as the primer's text 001 does).
    """
    f = TABLE[name]
    points = torch.tensor(
        sorted({v for v in f.values() if math.isfinite(v) and v >= f.min_normal}), dtype=torch.float64
    )
    between = (
        points[:-1, None] + (points[1:] - points[:-1])[:, None] * torch.arange(8, dtype=torch.float64) / 8
    ).flatten()
    lower = points[torch.searchsorted(points, between, right=True) - 1]
    upper = points[(torch.searchsorted(points, between)).clamp(max=len(points) - 1)]
    step = torch.exp2(torch.frexp(between)[1] - 1.0 - f.mantissa_bits)
    error = between - lower if mode == "truncated" else torch.minimum(between - lower, (upper - between).abs())
    return float((error / step).max())


def special_codes(name: str) -> tuple[int, int]:
    """Return how many of a format's codes are infinities, and how many are NaN."""
    values = TABLE[name].values()
    return sum(math.isinf(v) for v in values), sum(math.isnan(v) for v in values)


def lost_updates(weight: float, name: str, updates: Tensor) -> Tensor:
    """Tell for each update whether weight + update, rounded to nearest in a format, equals the weight.

    name: the format, to which the weight is rounded first.
    """
    start = fake_quantize(torch.tensor([weight]), name)
    return fake_quantize(start + updates, name) == start


def integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor, float]:
    """Return (codes, decoded values, scale) of integer quantization, as the primer's text 001 defines it.

    scale = (2^(bits − 1) − 1) / max|x|, codes = round(x · scale), and the decoded values are codes / scale.
    """
    scale = (2 ** (bits - 1) - 1) / float(x.abs().max())
    codes = torch.round(x * scale)
    return codes, codes / scale, scale
