"""Test how messages and reports write lists of items."""

from fewbits.common.wording import enumeration


def test_an_enumeration_names_each_item_once() -> None:
    assert enumeration(["3 M"]) == "3 M"
    assert enumeration(["3 M", "14 M", "3 M"]) == "3 M and 14 M"
    assert enumeration(["3 M", "14 M", "46 M"]) == "3 M, 14 M and 46 M"
