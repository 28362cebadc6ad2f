"""Round one number to formats: the code that it gets, the value of that code, and the neighbours of that value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fewbits.kernels.formats import TABLE, Format
from fewbits.kernels.quantizer import Quantizer


@dataclass(frozen=True, slots=True)
class Rounded:
    """A number rounded to one format.

    `below` or `above` is None if the format has no finite value on that side of `value`, or if `value` is NaN.
    """

    format: str
    bits: str  # the code in binary: sign, exponent and mantissa separated by blanks
    code: int
    value: float
    below: float | None  # the next smaller finite value of the format
    above: float | None  # the next larger finite value of the format
    error: float  # value − number
    kind: str  # zero, subnormal, normal, saturated or nan


def rounded(number: float, name: str | None = None) -> tuple[Rounded, ...]:
    """Return the number rounded to nearest, ties to even, in the format `name` or in all formats of elements.

    A number whose magnitude is beyond a format's largest value becomes this value, with the number's sign.
    name: as in a quantizer, in upper or lower case; ValueError if a quantizer cannot have this format, or if the number
    is NaN and the format has no NaN. Without a name, formats without NaN are left out for NaN.
    """
    if name is not None:
        return (_in_format(number, Quantizer(name.lower()).format),)
    return tuple(_in_format(number, f) for f in TABLE.values() if f.signed and (f.has_nan or not math.isnan(number)))


def _in_format(number: float, f: Format) -> Rounded:
    code = f.code_of(number)
    value = f.decode(code)
    magnitude = code & (1 << f.exponent_bits + f.mantissa_bits) - 1
    below, above = _neighbours(f, value, magnitude)
    if math.isnan(value):
        kind = "nan"
    elif _overflows(number, f):
        kind = "saturated"
    elif value == 0:
        kind = "zero"
    else:
        kind = "subnormal" if abs(value) < f.min_normal else "normal"
    return Rounded(f.name, _fields(code, f), code, value, below, above, value - number, kind)


def _overflows(number: float, f: Format) -> bool:
    """Tell whether the number, rounded without an upper limit of the exponent, is beyond the format's largest value."""
    if f.has_nan:
        return f.code_of(number, f.overflows[-1]) != f.code_of(number)
    half = (f.max - f.decode(f.max_code - 1)) / 2
    return abs(number) >= f.max + half  # all bits of the largest value are 1, so a tie goes beyond it


def _neighbours(f: Format, value: float, magnitude: int) -> tuple[float | None, float | None]:
    """Return the next finite values below and above `value`, a value of the format f; None where there is none.

    magnitude: the code of `value` without its sign bit. Without sign bits, the ascending order of codes is that of the
    absolute values, so the neighbours of `value` have the codes magnitude ± 1.
    """
    if math.isnan(value):
        return None, None
    outer = f.decode(magnitude + 1) if magnitude < f.max_code else None
    if magnitude == 0:
        return -f.min_subnormal, outer
    inner = f.decode(magnitude - 1)
    return (inner, outer) if value > 0 else (None if outer is None else -outer, -inner)


def _fields(code: int, f: Format) -> str:
    text = f"{code:0{f.bits}b}"
    sign, rest = text[: f.signed], text[f.signed :]
    return " ".join(part for part in (sign, rest[: f.exponent_bits], rest[f.exponent_bits :]) if part)


def parse_number(text: str) -> float:
    """Return the number that a user wrote: decimal, hexadecimal (0x1.8p-3), a fraction (1/3), inf or nan."""
    try:
        if "/" in text:
            top, _, bottom = text.partition("/")
            return float(top) / float(bottom)
        if "0x" in text.lower():
            return float.fromhex(text)
        return float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        valid = "valid are a decimal (0.3), a hexadecimal float (0x1.8p-3), a fraction (1/3), inf and nan"
        raise ValueError(f"number {text!r}: {valid}") from None
