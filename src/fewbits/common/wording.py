"""Write counts with their nouns, and lists with commas and a last `and`."""

from collections.abc import Iterable


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, with an s unless the count is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def enumeration(items: Iterable[str]) -> str:
    """Return different items as `a, b and c`."""
    *most, last = dict.fromkeys(items)
    return f"{', '.join(most)} and {last}" if most else last
