"""HTML as text: tags, numbers as people read them, and what a notebook's cell shows."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

MINUS = "\N{MINUS SIGN}"
THIN = "\N{NARROW NO-BREAK SPACE}"


@dataclass(frozen=True)
class Html:
    """What a notebook shows, here and in Jupyter."""

    text: str
    name: str

    def _repr_html_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<{self.name}>"


def tag(name: str, *inside: str, **attributes: str | None) -> str:
    """inside is HTML already; attributes are words. `class_` for class, `data_label` for data-label."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{words}>{''.join(inside)}</{name}>"


def words(text: object) -> str:
    """As HTML."""
    return html.escape(str(text), quote=False)


def anchor(name: str) -> str:
    """Where a thing stands on the page, and what its files are called: `Table 2` is table-2."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def listed(items: Iterable[str], class_: str | None = None) -> str:
    """Of HTML items."""
    return tag("ul", *(tag("li", item) for item in items), class_=class_)


def folded(summary: str, *inside: str, class_: str | None = None) -> str:
    return tag("details", tag("summary", summary), *inside, class_=class_)


def boxed(*inside: str) -> str:
    """What is wider than the page scrolls in a box of its own; by the keyboard too."""
    return tag("div", *inside, class_="scroll", tabindex="0")


def plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# -------------------------------------------------------------------------------- numbers


def decimals(value: float, error: float | None = None) -> int:
    """How many show two digits of the error; without one, five of the value."""
    size, digits = (abs(error), 2) if error else (abs(value), 5)
    return max(0, min(8, digits - 1 - math.floor(math.log10(size)))) if size > 0 else 0


def number(value: float, places: int | None = None, *, sign: bool = False) -> str:
    places = decimals(value) if places is None else places
    if abs(value) >= 1e6:
        mantissa, _, exponent = f"{value:{'+' if sign else ''}.3g}".partition("e")
        text = f"{mantissa} × 10{_raised(int(exponent))}" if exponent else f"{value:,.0f}"
    else:
        value = round(value, places) + 0.0  # no minus before a zero
        text = f"{value:{'+' if sign else ''},.{places}f}"
    return text.replace("-", MINUS).replace(",", THIN)


def effect(value: float, error: float | None, relative: bool, *, sign: bool = True) -> str:
    """In percent of the baseline where it is relative. A level, a share say, has no sign."""
    factor = 100 if relative else 1
    places = decimals(value * factor, error * factor if error else abs(value * factor) / 10 or None)
    return number(value * factor, places, sign=sign) + (f"{THIN}%" if relative else "")


def bounds(low: float, high: float, relative: bool, *, sign: bool = True) -> str:
    factor = 100 if relative else 1
    places = decimals(0.0, (high - low) / 2 * factor)
    return f"[{number(low * factor, places, sign=sign)}, {number(high * factor, places, sign=sign)}]"


def size(value: float, relative: bool) -> str:
    """Of a margin, or of what a design finds: two digits, without sign."""
    factor = 100 if relative else 1
    return number(value * factor, decimals(0.0, value * factor)) + (f"{THIN}%" if relative else "")


def _raised(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
