"""Test the exact claims about GAM's scales: they hold for our kernels, and fail if an encoder writes wrong scales.

M1 says that no element saturates; M2 says that the scales take eight bits for each block and 23 bits for each tensor.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.studies.mor import exact as arithmetic
from fewbits.kernels.packed import Packed, encode


def holds(found: Mapping[str, Exact]) -> bool:
    return all(one.holds for one in found.values())


@pytest.fixture(autouse=True)
def _afresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clear cached results before and after a test that replaces an encoder, so that no other test uses them."""
    broken = "monkeypatch" in request.fixturenames
    if broken:
        arithmetic.quantized.cache_clear()
    yield
    if broken:
        arithmetic.quantized.cache_clear()


def test_gam_never_saturates_and_a_naive_exponent_would() -> None:
    found = arithmetic.m1()
    assert holds(found)
    least, greatest = map(float, re.findall(r"\d\.\d+", found["blocks use more than half of the range"].detail))
    assert 0.5 < least < 0.51, "the tested values come close to both ends of the allowed interval"
    assert greatest == 1.0
    (undone,) = re.findall(r"[\d,]+ of these", found["nothing saturates"].notes[0])
    assert int(undone.split()[0].replace(",", "")) > 1000


def broken(packed: Packed, **changes: float) -> Packed:
    assert packed.scales is not None
    assert packed.group_scales is not None
    exponents = packed.scales + int(changes.get("exponent", 0))
    return replace(packed, scales=exponents, group_scales=packed.group_scales * changes.get("mantissa", 1.0))


@pytest.mark.parametrize(("exponent", "mantissa"), [(1, 1.0), (-1, 1.0), (0, 1.01)])
def test_scales_that_are_too_large_or_too_small_contradict_it(
    exponent: int, mantissa: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*words: Any) -> Packed:
        return broken(encode(*words), exponent=exponent, mantissa=mantissa)

    monkeypatch.setattr(arithmetic, "encode", other)
    assert not holds(arithmetic.m1())
