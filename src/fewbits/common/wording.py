"""Write counts with nouns (`3 trials`) and lists of items (`a, b and c`) in English."""

from collections.abc import Iterable


def plural(count: int, noun: str) -> str:
    """Return the count and the noun, with an s at its end unless the count is 1: `1 trial`, `3 trials`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def enumeration(items: Iterable[str]) -> str:
    """Return the items as `a, b and c`, without repeated ones; there has to be at least one."""
    *most, last = dict.fromkeys(items)
    return f"{', '.join(most)} and {last}" if most else last
