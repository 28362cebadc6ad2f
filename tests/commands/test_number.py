"""Test `fewbits number`, which prints a number's code and neighbours in one format or all."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fewbits import cli
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE, Format
from fewbits.kernels.number import Rounded, parse_number, rounded

ELEMENTS = [f for f in TABLE.values() if f.signed]


def _in(number: float, name: str) -> Rounded:
    (row,) = rounded(number, name)
    return row


@pytest.mark.parametrize("f", [f for f in ELEMENTS if f.bits <= 8], ids=str)
def test_every_value_has_itself_and_its_neighbours(f: Format) -> None:
    values = sorted({v for v in f.values() if math.isfinite(v)})
    for i, value in enumerate(values):
        row = _in(value, f.name)
        assert row.value == value
        assert row.below == (values[i - 1] if i else None)
        assert row.above == (values[i + 1] if i + 1 < len(values) else None)
        assert f.decode(row.code) == value


@pytest.mark.parametrize(
    ("number", "name", "kind"),
    [
        (500, "e4m3", "saturated"),
        (464, "e4m3", "normal"),  # a tie, whose even neighbour is 448
        (465, "e4m3", "saturated"),
        (6.9, "e2m1", "normal"),
        (7, "e2m1", "saturated"),
        (math.inf, "e5m2", "saturated"),
        (2**-9, "e4m3", "subnormal"),
        (0, "e2m1", "zero"),
        (math.nan, "e4m3", "nan"),
        (-2, "int8", "saturated"),
        (1.6, "int4", "normal"),
    ],
)
def test_the_kind_says_how_the_format_holds_the_number(number: float, name: str, kind: str) -> None:
    assert _in(number, name).kind == kind


@pytest.mark.parametrize("f", [f for f in ELEMENTS if f.bits <= 8], ids=str)
def test_a_quantizer_without_a_scale_gives_the_same_value(f: Format) -> None:
    numbers = [-100.0, -1.3, 0.3, 1.99, 2.0, 7.1]
    assert [_in(x, f.name).value for x in numbers] == fake_quantize(torch.tensor(numbers), f.name).tolist()


def test_without_a_format_all_of_quantizers_that_hold_the_number_are_shown() -> None:
    assert {row.format for row in rounded(-1)} == {f.name for f in ELEMENTS}
    assert {row.format for row in rounded(math.nan)} == {f.name for f in ELEMENTS if f.has_nan}
    with pytest.raises(ValueError, match=r"e2m1 .*NaN"):
        rounded(math.nan, "e2m1")


def test_numbers_are_decimal_hexadecimal_or_fractions() -> None:
    assert [parse_number(text) for text in ("0.5", "0x1p-1", "1/2", "5e-1")] == [0.5] * 4
    for wrong in ("half", "1/0", "1/2/3"):
        with pytest.raises(ValueError, match="1/3"):
            parse_number(wrong)


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["number", "0.3"]) == 0
    assert "0 0101 010" in capsys.readouterr().out
    assert cli.main(["number", "x"]) == 2


@pytest.mark.parametrize(
    ("typed", "value"),
    [("-448", -448), ("-0.3", -0.3125), ("-1/3", -0.34375), ("-0x1p-3", -0.125), ("-Inf", -448), ("-.5", -0.5)],
)
def test_a_negative_number_is_written_as_usual(typed: str, value: float, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([typed, "E4M3", "--json"], ["--json", "--", typed, "E4M3"]):
        assert cli.main(["number", *words]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["format"], row["value"]) == ("e4m3", value)
        assert (row["below"] is None) == (value == -448)
