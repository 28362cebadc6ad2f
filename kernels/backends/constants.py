"""Convert a quantizer to the integer constants that the C++ and CUDA kernels take; floats become their bits."""

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch

from fewbits.kernels.formats import Format, Overflow
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.rotation import hadamard_signs
from fewbits.kernels.scalings import KINDS, SCALE_ROUNDINGS, SELECTS

SIGN_WORDS = 4  # the number of 32-bit words for the 128 signs of the largest transform


class Grid(NamedTuple):  # csrc/numeric.h
    min_exponent: int
    dropped: int
    max: int
    overflow: int
    wide: int
    inf: int


class Scaling(NamedTuple):  # csrc/scale.h
    kind: int
    rounding: int
    grid: Grid
    sign: int
    nan_code: int
    target: int
    top: int
    expansion: int
    factor: int
    select: int


def grid_of(f: Format, overflow: Overflow = "saturate") -> Grid:
    beyond = {"saturate": f.max, "nan": float("nan"), "inf": float("inf")}[overflow]
    return Grid(
        min_exponent=f.emin + 127 << 23,
        dropped=23 - f.mantissa_bits,
        max=_bits(f.max),
        overflow=_bits(beyond),
        wide=int(f.exponent_bits == 8),
        inf=int(f.has_inf),
    )


def scaling_of(q: Quantizer) -> Scaling:
    traits, stored = q.traits, q.traits.stored or q.format  # with scaling none, no kernel reads `stored`
    return Scaling(
        kind=KINDS.index(traits.kind),
        rounding=SCALE_ROUNDINGS.index(traits.rounding),
        grid=grid_of(stored),
        sign=stored.signed << stored.bits - 1,
        nan_code=nan_code(stored),
        target=_bits(traits.target),
        top=_bits((traits.top or q.format.max) * traits.factor),
        expansion=_bits(traits.expansion),
        factor=_bits(traits.factor if traits.kind == "power" else 1.0),
        select=SELECTS.index(traits.select) + 1 if traits.select else 0,
    )


def nan_code(f: Format) -> int:
    return f.code_of(float("nan")) if f.has_nan else 0


def inf_code(f: Format) -> int:
    return f.code_of(float("inf"), "inf") if f.has_inf else 0


@lru_cache(maxsize=1024)  # with signs=each every GEMM may have new signs
def sign_words(q: Quantizer) -> tuple[int, ...]:
    """Return the random signs of the quantizer's Hadamard transform, as 32-bit words.

    Bit i mod 32 of word i div 32 is 1 if sign i is negative.
    """
    signs = hadamard_signs(q, torch.device("cpu")).tolist() if q.hadamard else []
    negative = sum(1 << i for i, sign in enumerate(signs) if sign < 0)
    return tuple(negative >> 32 * k & 0xFFFFFFFF for k in range(SIGN_WORDS))


def flat(constants: Iterable[object]) -> tuple[int, ...]:
    """Return the numbers of nested tuples in order, as they lie in memory in C++."""
    return tuple(n for part in constants for n in (flat(part) if isinstance(part, tuple) else (part,)))  # type: ignore[misc]


def _bits(value: float) -> int:
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value
