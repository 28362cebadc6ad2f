"""Test `from_dict`: it fills dataclasses from nested mappings; errors name the wrong value and the valid choices."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from fewbits.common.from_dict import from_dict, one_of


@dataclass(frozen=True)
class Wheel:
    spokes: int = 32


@dataclass(frozen=True)
class Bicycle:
    name: str
    gears: int
    weight: float = 9.5
    electric: bool = False
    colours: tuple[str, ...] = ()
    sizes: tuple[float, ...] = (1.0,)
    front: Wheel = field(default_factory=Wheel)
    spare: Wheel | None = None
    owner: str | None = None


LEAST: dict[str, Any] = {"name": "a", "gears": 7}


def test_fields_arrive_with_their_types_and_defaults_fill_the_rest() -> None:
    data = LEAST | {
        "weight": 8,
        "colours": ["red"],
        "sizes": [1, 2.5],
        "front": {"spokes": 36},
        "spare": {},
        "owner": None,
    }
    found = from_dict(Bicycle, data)
    assert found == Bicycle("a", 7, 8.0, False, ("red",), (1.0, 2.5), Wheel(36), Wheel(), None)
    assert isinstance(found.weight, float)
    assert all(isinstance(size, float) for size in found.sizes)
    assert from_dict(Bicycle, LEAST) == Bicycle("a", 7)


BAD: dict[str, tuple[Any, str]] = {
    "a float of too many digits": (
        LEAST | {"weight": 10**400},
        "weight: a number up to 1.8e308 is expected, not one of 401 digits",
    ),
    "unknown key": (
        LEAST | {"saddle": 1},
        "unknown key bike.saddle: valid keys are name, gears, weight, electric, colours",
    ),
    "unknown nested key": (LEAST | {"front": {"rim": 1}}, "unknown key bike.front.rim: valid keys are spokes"),
    "missing": ({"weight": 1.0}, "bike: missing keys: name, gears"),
    "number for a mapping": (LEAST | {"front": 3}, "bike.front: a mapping with the keys spokes is expected, not 3"),
    "text for a number": (LEAST | {"gears": "7"}, "bike.gears: int is expected, not '7'"),
    "fraction for a whole number": (LEAST | {"gears": 7.0}, "bike.gears: int is expected, not 7.0"),
    "True for a whole number": (LEAST | {"gears": True}, "bike.gears: int is expected, not True"),
    "1e-4, which YAML 1.1 reads as text": (LEAST | {"weight": "1e-4"}, "bike.weight: float is expected, not '1e-4'"),
    "text for a list": (LEAST | {"colours": "red"}, "bike.colours: a list is expected, not 'red'"),
    "wrong type of an optional field": (LEAST | {"owner": 3}, "bike.owner: str is expected, not 3"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        from_dict(Bicycle, data, "bike")


def test_a_mistake_at_the_top_names_the_key_alone() -> None:
    with pytest.raises(ValueError, match=r"^unknown key saddle: "):
        from_dict(Bicycle, LEAST | {"saddle": 1})


def test_a_choice_names_the_value_and_what_is_valid() -> None:
    one_of("colour", "red", ("red", "green"))
    with pytest.raises(ValueError, match=re.escape("side 3: valid values are 1, 2")):
        one_of("side", 3, (1, 2))
