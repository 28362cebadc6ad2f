"""Format large counts with a unit letter: 3.3 M."""

from __future__ import annotations

UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def amount(count: float, digits: int = 2) -> str:
    """Return a count with the letter k, M, B or T for its power of ten, for example 3.3 M, 134 M or 8.5 B.

    digits: the significant digits; a number with more digits before the point is rounded to an integer.
    """
    for unit, size in UNITS:
        if abs(count) >= size:
            value = count / size
            return f"{value:.0f} {unit}" if abs(value) >= 10**digits else f"{value:.{digits}g} {unit}"
    return f"{count:g}"
