"""Compare formats with ml_dtypes, numpy and torch: all codes of a format if it has at most 16 bits."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbits.kernels.formats import TABLE, Format
from tests.messages import naming

# Our name of a format, the dtype in another library, and the overflow rule of that library's cast
ML_DTYPES = [
    ("e4m3", ml_dtypes.float8_e4m3fn, "nan"),
    ("e4m3ieee", ml_dtypes.float8_e4m3, "inf"),
    ("e5m2", ml_dtypes.float8_e5m2, "inf"),
    ("e3m4", ml_dtypes.float8_e3m4, "inf"),
    ("e2m1", ml_dtypes.float4_e2m1fn, "saturate"),
    ("e3m2", ml_dtypes.float6_e3m2fn, "saturate"),
    ("e2m3", ml_dtypes.float6_e2m3fn, "saturate"),
    ("bf16", ml_dtypes.bfloat16, "inf"),
    ("fp16", np.float16, "inf"),
]


NAMES = [f"e{e}m{m}{suffix}" for e, m, suffix in product(range(1, 9), range(1, 22), ("", "fn", "ieee", "finite"))]


def valid(name: str) -> bool:
    try:
        Format.parse(name)
    except ValueError:
        return False
    return True


SMALL = sorted({Format.parse(name) for name in NAMES if valid(name) and Format.parse(name).bits <= 10}, key=str)


def unsigned_dtype(f: Format) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if f.bits <= 8 else np.uint16


def same(ours: tuple[float, ...], theirs: np.ndarray[Any, Any]) -> None:
    """Check that arrays are equal, including the signs of zeros; NaN equals NaN."""
    a, b = np.array(ours), np.asarray(theirs, dtype=np.float64)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.signbit(a)[~np.isnan(a)], np.signbit(b)[~np.isnan(b)])


# Facts


@pytest.mark.parametrize(
    ("name", "bits", "emin", "emax", "top", "normal", "subnormal", "nan", "inf"),
    [  # OCP OFP8 v1.0 table 1, OCP MX v1.0 tables 2 to 7
        ("e4m3", 8, -6, 8, 448, 2**-6, 2**-9, True, False),
        ("e5m2", 8, -14, 15, 57344, 2**-14, 2**-16, True, True),
        ("e2m1", 4, 0, 2, 6, 1, 0.5, False, False),
        ("e3m2", 6, -2, 4, 28, 0.25, 0.0625, False, False),
        ("e2m3", 6, 0, 2, 7.5, 1, 0.125, False, False),
        ("e3m4", 8, -2, 3, 15.5, 0.25, 2**-6, True, True),
        ("e8m0", 8, -127, 127, 2.0**127, 2.0**-127, 2.0**-127, True, False),
        ("e4m3ieee", 8, -6, 7, 240, 2**-6, 2**-9, True, True),
    ],
)
def test_facts_are_those_of_the_standards(
    name: str, bits: int, emin: int, emax: int, top: float, normal: float, subnormal: float, nan: bool, inf: bool
) -> None:
    f = Format.parse(name)
    assert (f.bits, f.emin, f.emax, f.max) == (bits, emin, emax, top)
    assert (f.min_normal, f.min_subnormal, f.has_nan, f.has_inf) == (normal, subnormal, nan, inf)


def test_spread_of_e5m2_is_the_constant_of_mor_eq_4() -> None:
    assert Format.parse("e5m2").spread == 939_524_096


# Values


@pytest.mark.parametrize(("name", "dtype"), [(n, d) for n, d, _ in ML_DTYPES] + [("e8m0", ml_dtypes.float8_e8m0fnu)])
def test_every_code_means_what_ml_dtypes_says(name: str, dtype: Any) -> None:
    f = Format.parse(name)
    with np.errstate(invalid="ignore"):
        same(f.values(), np.arange(2**f.bits).astype(unsigned_dtype(f)).view(dtype).astype(np.float64))


@pytest.mark.parametrize("f", SMALL, ids=str)
def test_positive_values_ascend_to_max_and_negatives_mirror_them(f: Format) -> None:
    values, half = f.values(), 2 ** (f.bits - 1)
    finite = values[: f.max_code + 1]
    assert finite[0] == 0
    assert all(a < b for a, b in pairwise(finite))
    assert finite[-1] == f.max
    assert not any(map(math.isfinite, values[f.max_code + 1 : half]))
    same(tuple(-v for v in values[half:]), np.array(values[:half]))


def test_values_are_cached_and_refuse_more_than_16_bits() -> None:
    f = Format.parse("e5m2")
    assert f.values() is f.values()
    with pytest.raises(ValueError, match="at most 16 bits"):
        Format.parse("fp32").values()


# Rounding


def every_bf16() -> np.ndarray[Any, Any]:
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float().numpy()


@pytest.mark.parametrize(("name", "dtype", "overflow"), [row for row in ML_DTYPES if row[0] != "bf16"])
def test_every_bf16_rounds_to_the_code_ml_dtypes_gives(name: str, dtype: Any, overflow: Any) -> None:
    f, x = Format.parse(name), every_bf16()
    x = x if f.has_nan else x[~np.isnan(x)]
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = x.astype(dtype).view(unsigned_dtype(f))
    ours = np.array([f.code_of(v, overflow) for v in x.tolist()])
    numbers = ~np.isnan(x)  # numpy's float16 keeps the payload of a NaN, so for NaN only the result NaN is checked
    np.testing.assert_array_equal(ours[numbers], theirs[numbers])
    assert all(math.isnan(f.decode(code)) for code in ours[~numbers].tolist())


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16), ("fp32", np.float32)])
def test_random_doubles_of_every_magnitude_round_as_in_one_step(name: str, dtype: Any) -> None:
    f, random = Format.parse(name), np.random.default_rng(1)
    x = random.normal(size=20_000) * 2.0 ** random.integers(f.emin - f.mantissa_bits - 3, f.emax + 2, size=20_000)
    if name == "bf16":  # ml_dtypes rounds doubles to float32 first
        x = x[np.abs(x) <= f.max].astype(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        theirs = x.astype(dtype)
    np.testing.assert_array_equal([f.code_of(v, "inf") for v in x.tolist()], theirs.view(f"u{theirs.itemsize}"))


@given(st.sampled_from(SMALL), st.floats(allow_nan=False, allow_infinity=False, width=32) | st.floats(-20, 20))
def test_no_value_of_any_format_is_nearer_and_ties_go_to_the_even_code(f: Format, x: float) -> None:
    code = f.code_of(x)
    distance = abs(Fraction(f.decode(code)) - Fraction(x))
    magnitude = code % 2 ** (f.bits - 1)
    for other in {max(magnitude - 1, 0), min(magnitude + 1, f.max_code)} - {magnitude}:
        there = abs(Fraction(f.decode(other)) - abs(Fraction(x)))
        assert distance < there or (distance == there and code % 2 == 0)


@pytest.mark.parametrize("x", [math.nextafter(464.0, 500.0), 1e38, 1e300, math.inf])
def test_overflow_is_what_was_asked_for(x: float) -> None:
    e4m3, e5m2 = Format.parse("e4m3"), Format.parse("e5m2")
    assert e4m3.decode(e4m3.code_of(-x)) == -448
    assert e4m3.code_of(-x, "nan") == 0xFF
    assert e5m2.decode(e5m2.code_of(x * 1000, "inf")) == math.inf
    assert e5m2.decode(e5m2.code_of(x * 1000, "saturate")) == 57344
    assert math.isnan(e5m2.decode(e5m2.code_of(x * 1000, "nan")))


def test_a_format_refuses_what_it_has_no_code_for() -> None:
    with pytest.raises(ValueError, match=r"valid values are saturate, nan$"):
        Format.parse("e4m3").code_of(1.0, "inf")
    with pytest.raises(ValueError, match=r"valid values are saturate$"):
        Format.parse("e2m1").code_of(1.0, "nan")
    with pytest.raises(ValueError, match="no code for NaN"):
        Format.parse("e2m1").code_of(math.nan)
    with pytest.raises(ValueError, match="unsigned"):
        Format.parse("e8m0").code_of(-1.0)
    for code in (-1, 256):
        with pytest.raises(ValueError, match="0 to 255"):
            Format.parse("e4m3").decode(code)


@pytest.mark.parametrize(
    ("name", "code"),
    [("bf16", 0x7FC0), ("fp16", 0x7E00), ("e5m2", 0x7E), ("e4m3", 0x7F), ("e3m4", 0x78), ("fp32", 0x7FC00000)],
)
def test_nan_is_the_quiet_one_of_ieee_754_or_the_only_one(name: str, code: int) -> None:
    assert Format.parse(name).code_of(math.nan) == code
    assert math.isnan(Format.parse(name).decode(code))


def test_e8m0_rounds_as_ml_dtypes_and_torch_do_where_float32_is_normal() -> None:
    f = Format.parse("e8m0")
    x = every_bf16()
    x = x[x >= 2.0**-126]  # both libraries round (2^-127, 1.5·2^-127) up to 2^-126, although 2^-127 is nearer
    ours = [f.code_of(v, "nan") for v in x.tolist()]
    np.testing.assert_array_equal(ours, x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8))
    np.testing.assert_array_equal(ours, torch.from_numpy(x).to(torch.float8_e8m0fnu).view(torch.uint8).numpy())


def test_e8m0_takes_zero_and_all_below_to_its_smallest_power_of_two() -> None:
    f = Format.parse("e8m0")
    assert {f.code_of(x) for x in (0.0, 5e-324, 2.0**-149, 2.0**-128, 2.0**-127, 1.4 * 2.0**-127)} == {0}
    assert f.code_of(math.nan) == 0xFF


# Names


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        *((alias, row.name) for row in TABLE.values() for alias in row.aliases),
        ("e4m3fn", "e4m3"),
        ("e8m7", "bf16"),
        ("e5m10", "fp16"),
        ("e8m23", "fp32"),
        ("e5m2ieee", "e5m2"),
        ("e3m4ieee", "e3m4"),
        ("e2m1finite", "e2m1"),
        ("e2m1fn", "e2m1"),  # float4_e2m1fn of ml_dtypes and torch has no NaN
        ("e5m3ieee", "e5m3"),
        ("e3m1finite", "e3m1"),
        ("e4m3ieee", "e4m3ieee"),
        ("e4m3finite", "e4m3finite"),
        ("e5m2fn", "e5m2fn"),
        ("e2m1ieee", "e2m1ieee"),
    ],
)
def test_two_spellings_of_the_same_facts_are_one_format(spelling: str, name: str) -> None:
    assert Format.parse(spelling) is Format.parse(name)
    assert str(Format.parse(spelling)) == name


def test_names_and_facts_are_one_to_one() -> None:
    formats = {Format.parse(name) for name in [*TABLE, *filter(valid, NAMES)]}
    assert all(Format.parse(f.name) is f for f in formats)
    facts = {(f.exponent_bits, f.mantissa_bits, f.bias, f.specials, f.signed) for f in formats}
    assert len(facts) == len(formats)


def test_a_bare_name_is_finite_below_8_bits_and_ieee_from_8_on() -> None:
    bare = [Format.parse(name) for name in filter(valid, NAMES) if name[-1].isdigit() and name not in TABLE]
    assert all(f.specials == ("none" if f.bits < 8 else "ieee") for f in bare)


@pytest.mark.parametrize("name", ["", "fp8", "E4M3", "e4", "e0m3", "e4m0", "e4m3fnuz", "e4m3 ", "int6"])
def test_an_unknown_name_is_told_the_valid_ones(name: str) -> None:
    with pytest.raises(ValueError, match=naming(repr(name), "e4m3, e5m2, e2m1", "1 ≤ X ≤ 8")):
        Format.parse(name)


@pytest.mark.parametrize("name", ["e9m1", "e4m22", "e8m22", "e1m7ieee", "e999m999", "e8m23finite"])
def test_a_name_beyond_the_limits_is_told_them(name: str) -> None:
    with pytest.raises(ValueError, match=naming("1 ≤ X ≤ 8", "1 ≤ Y ≤ 21")):
        Format.parse(name)


@pytest.mark.parametrize(("name", "largest", "unit"), [("int8", 127, 2**-6), ("int4", 7, 2**-2)])
def test_integers_have_all_multiples_of_their_unit_and_no_lowest_one(name: str, largest: int, unit: float) -> None:
    values = set(Format.parse(name).values())
    assert values == {n * unit for n in range(-largest, largest + 1)}
