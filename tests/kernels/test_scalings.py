"""Check that the C++ enumerations agree with the records of scalings.py, and that wrong records are refused."""

import re
from typing import Any

import pytest

from fewbits.kernels.backends import compilation
from fewbits.kernels.formats import TABLE
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.scalings import KINDS, SCALE_ROUNDINGS, SCALINGS
from fewbits.kernels.scalings import Scaling as Record
from tests.messages import naming

SCALE_H = compilation.SOURCES / "scale.h"


def enumerators(name: str) -> list[str]:
    match = re.search(rf"{name}\b[^{{;]*{{(?:\s*enum : uint32_t {{)?([^}}]*)}}", SCALE_H.read_text())
    assert match is not None
    numbered = [part.split("=") for part in match[1].split(",")]
    assert [int(number) for _, number in numbered] == list(range(len(numbered)))
    return [part.strip().lower().replace("_", "-") for part, _ in numbered]


def test_enumerations_have_the_same_order_in_cpp() -> None:
    assert enumerators("ScalingKind") == [kind for kind in KINDS if kind != "affine"]  # which only the reference has
    assert enumerators("ScaleRounding") == list(SCALE_ROUNDINGS)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("e4m3:1x16:fouroversix", "format"),
        ("e4m3:1x16:eden:rht16", "format"),
        ("e2m1:1x32:eden:rht16", "block"),
        ("e2m1:1x16:eden:rht16:stochastic", "rounding"),
        ("e2m1:1x16:eden:rht8", "hadamard"),
        ("e2m1:1x16:eden", "hadamard"),
    ],
)
def test_a_quantizer_beyond_a_scalings_restrictions_is_told_which_are_valid(text: str, field: str) -> None:
    scaling = text.split(":")[2]
    with pytest.raises(ValueError, match=f"'{scaling}' with {field} ") as error:
        Quantizer.parse(text)
    assert ", ".join(map(str, getattr(SCALINGS[scaling], f"{field}s"))) in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "power", "stored": TABLE["e8m0"], "rounding": "nearest"},
        {"kind": "float", "stored": TABLE["fp32"], "target": 224.0},
        {"kind": "float", "stored": TABLE["e4m3"]},
        {"kind": "mantissa", "stored": TABLE["e8m0"], "rounding": "up", "top": 3.0},
        {"kind": "two-level", "stored": TABLE["e4m3"]},
    ],
)
def test_a_record_has_no_field_that_its_kind_does_not_use(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no arithmetic"):
        Record("new", **fields)


@pytest.mark.parametrize(
    ("stored", "target", "named"),
    [
        ("e4m3", 449.0, ("target=449", "448", "e4m3")),
        ("ue5m3", -1.0, ("target=-1",)),
        ("bf16", 448.0, ("stored=bf16", "8 bits")),
        ("e2m1", 6.0, ("stored=e2m1", "NaN")),  # a block that is not finite needs a code
        (None, 448.0, ("stored=None",)),
    ],
)
def test_block_scales_of_two_levels_fit_their_format(stored: str | None, target: float, named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=naming(*named)):
        Record("new", "two-level", TABLE[stored] if stored else None, target=target)
