"""Define the number formats: a table of their basic facts, from which all other properties are derived.

A format ExMy splits a code into a sign, x exponent bits and y mantissa bits. Exponent field 0 holds zero and the
subnormals. The format's `specials` says what the highest codes mean. The named formats are those of OCP OFP8 v1.0
(e4m3, e5m2), OCP MX v1.0 (e2m1, e3m2, e2m3, e8m0), CUDA (ue5m3) and IEEE 754 (fp16, fp32; bf16 and e3m4 follow
IEEE 754's rules).

All values are exact, because a Python float can hold every value of every format. `code_of` is the slow, readable
rounding against which the fast kernels are tested.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Final, Literal, get_args

Specials = Literal["none", "nan", "ieee"]
Overflow = Literal["saturate", "nan", "inf"]

_LIMITS = "1 ≤ X ≤ 8, 1 ≤ Y ≤ 21; 2 ≤ X with infinities, X ≤ 7 without"
_BEYOND_LIMITS = {(8, 23, "ieee", True), (8, 0, "nan", False)}  # fp32 and e8m0
_BY_BITS = re.compile(r"e([1-9][0-9]{0,2})m([1-9][0-9]{0,2})(fn|ieee|finite)?")  # a name that says the numbers of bits


@dataclass(frozen=True, slots=True)
class Format:
    """A number format, such as e4m3; `Format.parse` returns the same object for all names of a format."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials  # none: every code is a number; nan: the last code is NaN; ieee: the top exponent is inf or NaN
    signed: bool = True
    aliases: tuple[str, ...] = field(default=(), compare=False, repr=False)  # other names that `parse` knows

    def __post_init__(self) -> None:
        e, m = self.exponent_bits, self.mantissa_bits
        for name in (self.name, *self.aliases):
            if (named := _BY_BITS.fullmatch(name)) and (int(named[1]), int(named[2])) != (e, m):
                raise ValueError(f"{name!r} cannot name a format with {e} exponent bits and {m} mantissa bits")
        if self.specials not in get_args(Specials):
            valid = ", ".join(get_args(Specials))
            raise ValueError(f"specials {self.specials!r} of format {self.name!r}: valid values are {valid}")
        within = 1 <= e <= 8 and 1 <= m <= 21 and (e >= 2 or not self.has_inf)
        if not within and (e, m, self.specials, self.signed) not in _BEYOND_LIMITS:
            raise ValueError(f"format {self.name!r} is beyond the limits: valid formats are eXmY with {_LIMITS}")
        if self.emax > 127 or self.emin - m < -149:
            range_ = f"2^{self.emin - m} to 2^{self.emax}"
            raise ValueError(
                f"format {self.name!r} covers {range_}, which exceeds float32: valid formats are eXmY with {_LIMITS}"
            )

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def parse(name: str) -> Format:
        """Return the format with this name: a row of `TABLE`, an alias, or any `eXmY`.

        A suffix says what the highest codes mean. `ieee`: infinities and NaN. `fn`: no infinity, and NaN in the last
        code; with fewer than 8 bits no NaN either, as in the float4_e2m1fn of other libraries. `finite`: every code is
        a number. If a name eXmY has no suffix and is not in the table, the format is `finite` if it has fewer than 8
        bits, else `ieee`.
        """
        return _parse(name)

    # The meaning of codes and their packed storage

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def stored_bits(self) -> int:
        """The number of bits that one code occupies in packed storage.

        It is `bits` for formats of up to 8 bits, and 16 for formats of 9 to 16 bits. Wider formats are not packed.
        """
        return self.bits if self.bits <= 8 else 16

    def row_bytes(self, cols: int) -> int:
        """Return the number of bytes of a packed row of `cols` codes; every row starts at a byte boundary."""
        return (cols * self.stored_bits + 7) // 8

    @property
    def has_nan(self) -> bool:
        return self.specials != "none"

    @property
    def has_inf(self) -> bool:
        return self.specials == "ieee"

    @property
    def has_zero(self) -> bool:
        """True if exponent field 0 holds zero; in e8m0, which has no zero, field 0 is one more power of two."""
        return self.mantissa_bits > 0

    @property
    def max_code(self) -> int:
        """The code of the largest finite value."""
        if self.has_inf:
            return self._inf_code - 1
        return (1 << self.exponent_bits + self.mantissa_bits) - (2 if self.has_nan else 1)

    @property
    def _inf_code(self) -> int:
        return (1 << self.exponent_bits) - 1 << self.mantissa_bits

    @property
    def _nan_code(self) -> int:
        quiet = self._inf_code | 1 << self.mantissa_bits >> 1
        return quiet if self.has_inf else self.max_code + 1

    # The range of values

    @property
    def emax(self) -> int:
        """The exponent of the largest finite value (the emax_elem of OCP MX v1.0)."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal value."""
        return (1 if self.has_zero else 0) - self.bias

    @property
    def max(self) -> float:
        return self.decode(self.max_code)

    @property
    def min_normal(self) -> float:
        return math.ldexp(1.0, self.emin)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value, and the step between values up to 2·min_normal."""
        return math.ldexp(1.0, self.emin - self.mantissa_bits)

    @property
    def spread(self) -> float:
        """The ratio max / min_normal: the largest ratio between the magnitudes of two normal values (MoR eq. 4)."""
        return self.max / self.min_normal

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The valid rules for values beyond max: `saturate` in every format, `nan` and `inf` if the format has them."""
        return ("saturate", *(("nan",) if self.has_nan else ()), *(("inf",) if self.has_inf else ()))

    # Conversion between codes and numbers

    def decode(self, code: int) -> float:
        """Return the value of a code."""
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"code {code} is not a code of {self.name}: valid codes are 0 to {(1 << self.bits) - 1}")
        negative, magnitude = divmod(code, 1 << self.exponent_bits + self.mantissa_bits)
        field, significand = divmod(magnitude, 1 << self.mantissa_bits)
        if magnitude > self.max_code:
            value = math.inf if self.has_inf and magnitude == self._inf_code else math.nan
        elif field == 0 and self.has_zero:
            value = math.ldexp(significand, self.emin - self.mantissa_bits)
        else:
            value = math.ldexp(significand + (1 << self.mantissa_bits), field - self.bias - self.mantissa_bits)
        return -value if negative else value

    def values(self) -> tuple[float, ...]:
        """Return the values of all codes, in the order of codes; a format of more than 16 bits raises ValueError."""
        if self.bits > 16:
            raise ValueError(f"{self.name} has 2^{self.bits} codes: values() supports formats of at most 16 bits")
        return _values(self)

    def code_of(self, value: float, overflow: Overflow = "saturate") -> int:
        """Return the code of the format's value that is nearest to `value`; ties go to the even code.

        A value that rounds beyond ±max, infinities included, becomes ±max (saturate), NaN (nan) or ±inf (inf). The sign
        is kept, also for zero and NaN. In e8m0, which has no zero, zero becomes the smallest value. ValueError is
        raised for NaN if the format has no NaN, and for a negative value or -0.0 if the format is unsigned.
        """
        if overflow not in self.overflows:
            raise ValueError(
                f"overflow {overflow!r} with format {self.name}: valid values are {', '.join(self.overflows)}"
            )
        negative = math.copysign(1.0, value) < 0
        if math.isnan(value):
            if not self.has_nan:
                raise ValueError(f"{self.name} has no code for NaN: pass a number, or use a format that has NaN")
            magnitude = self._nan_code
        elif negative and not self.signed:
            raise ValueError(
                f"{self.name} is unsigned and has no code for {value!r}: pass a value without a minus sign"
            )
        else:
            magnitude = self._nearest(abs(value))
            if magnitude > self.max_code:
                magnitude = {"saturate": self.max_code, "nan": self._nan_code, "inf": self._inf_code}[overflow]
        return magnitude | (negative and self.signed) << self.bits - 1

    def _nearest(self, value: float) -> int:
        """Return the code nearest to a value ≥ 0, as if codes had no upper limit.

        For inf, return the code after that of the format's largest value.
        All steps before the rounding are exact, because they scale by powers of two.
        """
        if value == 0:
            return 0
        if math.isinf(value):
            return self.max_code + 1
        exponent = max(math.frexp(value)[1] - 1, self.emin)
        steps = round(math.ldexp(value, self.mantissa_bits - exponent))  # round() takes ties to even
        # Codes number the grid values, 2^M in each binade, so a carry correctly moves the code into the next binade.
        code = steps + (exponent - self.emin << self.mantissa_bits)
        return code if self.has_zero else max(code - 1, 0)


# fmt: off
_ROWS = (
    #      name    E   M  bias specials
    Format("e4m3", 4,  3,   7, "nan"),  # called e4m3fn elsewhere
    Format("e5m2", 5,  2,  15, "ieee"),
    Format("e2m1", 2,  1,   1, "none"),
    Format("e3m2", 3,  2,   3, "none"),
    Format("e2m3", 2,  3,   1, "none"),
    Format("e3m4", 3,  4,   3, "ieee"),
    Format("int8", 1,  6,   1, "none"),  # integers −127 to 127 in units of 2^-6, as in OCP's MXINT8; −128 is not used
    Format("int4", 1,  2,   1, "none"),  # integers −7 to 7 in units of 2^-2
    Format("e8m0", 8,  0, 127, "nan", signed=False),  # holds scales: powers of two
    Format("ue5m3",5,  3,  15, "nan", signed=False),  # for scales; only 0xFF is NaN, as in CUDA's __nv_fp8_ue5m3
    Format("bf16", 8,  7, 127, "ieee", aliases=("bfloat16",)),
    Format("fp16", 5, 10,  15, "ieee", aliases=("float16", "half")),
    Format("fp32", 8, 23, 127, "ieee", aliases=("float32",)),
)
# fmt: on


def by_name(rows: Iterable[Format]) -> dict[str, Format]:
    """Return the formats by their names and aliases; raise ValueError if two formats share one."""
    found: dict[str, Format] = {}
    for row in rows:
        for name in (row.name, *row.aliases):
            if found.setdefault(name, row) is not row:
                raise ValueError(f"format {row.name!r}: {name!r} is a name of {found[name].name!r} already")
    return found


TABLE: Final[Mapping[str, Format]] = MappingProxyType({row.name: row for row in _ROWS})
_NAMED = by_name(_ROWS)
_SUGGESTIONS: Final[Mapping[str, str]] = MappingProxyType(  # names that users may try, and what to write instead
    {
        "fp8": "e4m3 or e5m2",
        "fp6": "e3m2 or e2m3",
        "fp4": "e2m1",
        "mxfp8": "e4m3:1x32:mx",
        "mxfp6": "e3m2:1x32:mx",
        "mxfp4": "e2m1:1x32:mx",
        "nvfp4": "e2m1:1x16:nvfp4",
        "mxint8": "int8:1x32:mx",
        "nvint4": "int4:1x16:nvfp4",
        "float8_e4m3fn": "e4m3",
        "float8_e5m2": "e5m2",
        "float4_e2m1fn_x2": "e2m1",
    }
)
_BY_FACTS = {
    (row.exponent_bits, row.mantissa_bits, row.specials): row
    for row in _ROWS
    if row.signed and not row.name.startswith("int")
}
_SUFFIXES: dict[str, Specials] = {"fn": "nan", "ieee": "ieee", "finite": "none"}
_SUFFIX_OF = {specials: suffix for suffix, specials in _SUFFIXES.items()}


@cache
def _parse(name: str) -> Format:
    row = _NAMED.get(name)
    if row:
        return row
    match = _BY_BITS.fullmatch(name)
    if not match:
        suggestion = _SUGGESTIONS.get(name.lower().removeprefix("torch."))
        hint = f" (did you mean {suggestion}?)" if suggestion else ""
        raise ValueError(
            f"unknown format {name!r}{hint}: valid formats are {', '.join(TABLE)}, or any eXmY ({_LIMITS}), "
            f"optionally with a suffix: {', '.join(_SUFFIXES)}"
        )
    e, m, suffix = int(match[1]), int(match[2]), match[3]
    default: Specials = "none" if 1 + e + m < 8 else "ieee"
    specials = _SUFFIXES.get(suffix, default)
    if suffix == "fn" and default == "none":
        specials = "none"
    row = _BY_FACTS.get((e, m, specials))
    if row:
        return row
    bare = f"e{e}m{m}"
    canonical = bare if specials == default and bare not in TABLE else bare + _SUFFIX_OF[specials]
    if canonical != name:
        return _parse(canonical)
    return Format(name, e, m, bias=(1 << e - 1) - 1, specials=specials)


@cache
def _values(grid: Format) -> tuple[float, ...]:
    return tuple(grid.decode(code) for code in range(1 << grid.bits))
