"""Format numbers of parameters and tokens briefly."""

from __future__ import annotations

UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def amount(count: float, digits: int = 2) -> str:
    """Return a large number with a letter for its power of ten, for example 3.3 M, 134 M or 8.5 B."""
    for unit, size in UNITS:
        if abs(count) >= size:
            value = count / size
            return f"{value:.0f} {unit}" if abs(value) >= 10**digits else f"{value:.{digits}g} {unit}"
    return f"{count:g}"
