"""Format numbers, effects, intervals and names as text for readers of reports."""

from __future__ import annotations

import math
import re

MINUS = "\N{MINUS SIGN}"
THIN = "\N{NARROW NO-BREAK SPACE}"
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def anchor(name: str) -> str:
    """Convert a name to the form of HTML ids and file names, for example `Table 2` to `table-2`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def sentence(text: str) -> str:
    """Return the text with a capital letter at the start and a full stop at the end, if it has no end mark yet."""
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."


def decimals(value: float, error: float | None = None) -> int:
    """Return how many decimals show two significant digits of the error or, without an error, five of the value."""
    size, digits = (abs(error), 2) if error else (abs(value), 5)
    return max(0, min(8, digits - 1 - math.floor(math.log10(size)))) if size > 0 else 0


def number(value: float, places: int | None = None, *, sign: bool = False) -> str:
    """Return a number as text; from 10⁶ on, with three significant digits and a power of ten.

    places: the number of decimals; None for about five significant digits. sign: show a plus sign.
    """
    places = decimals(value) if places is None else places
    if abs(value) >= 1e6:
        mantissa, _, exponent = f"{value:{'+' if sign else ''}.3g}".partition("e")
        text = f"{mantissa} × 10{str(int(exponent)).translate(RAISED)}" if exponent else f"{value:,.0f}"
    else:
        value = round(value, places) + 0.0  # + 0.0 turns -0.0 into 0.0
        text = f"{value:{'+' if sign else ''},.{places}f}"
    return text.replace("-", MINUS).replace(",", THIN)


def effect(value: float, error: float | None, relative: bool, *, sign: bool = True) -> str:
    """Return an effect as text, rounded to two significant digits of its error.

    error: the half width of the effect's interval; None shows three significant digits of the effect. relative: the
    effect is a fraction and is shown in percent. sign: show a plus sign; False for levels such as shares.
    """
    factor = 100 if relative else 1
    places = decimals(value * factor, error * factor if error else abs(value * factor) / 10 or None)
    return number(value * factor, places, sign=sign) + (f"{THIN}%" if relative else "")


def bounds(low: float, high: float, relative: bool, *, sign: bool = True) -> str:
    """Return an interval as the text `[low, high]`. relative, sign: as for `effect`."""
    factor, unit = (100, f"{THIN}%") if relative else (1, "")
    places = decimals(0.0, (high - low) / 2 * factor)
    return f"[{number(low * factor, places, sign=sign)}, {number(high * factor, places, sign=sign)}]{unit}"


def size(value: float, relative: bool) -> str:
    """Return a margin or a minimum detectable effect as text with two significant digits. relative: as for `effect`."""
    factor, unit = (100, f"{THIN}%") if relative else (1, "")
    return number(value * factor, decimals(0.0, value * factor)) + unit
