"""The appearance of all figures: one width, two themes, seven styles of series, and SVG and PNG files.

A figure is drawn on request and once, in the light theme; `in_both_themes` adds the colours of the dark theme to its
SVG. pyplot is not used, and matplotlib's settings are restored after each call. Figures are WIDTH inches wide. Text has
at least SMALL points, so it is readable on a phone that shows the figure 360 pixels wide.

Series differ in colour, dashes and markers. The colours are those of Okabe and Ito, which colour-blind readers can
tell apart, darker on white and lighter on black.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fewbits.analysis.report.items import FigureResult
from fewbits.common.from_dict import from_dict

Array = NDArray[np.float64]

WIDTH = 5.6  # inches
TEXT, SMALL = 9.0, 8.2  # points, as in theme.yaml; SMALL is 7.3 pixels in a figure 360 pixels wide
# The fonts that an SVG names, for browsers. Matplotlib computes layouts with DejaVu Sans, which is wider than these.
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    background: str
    text: str
    quiet: str  # the colour of spines, ticks and notes
    grid: str
    series: tuple[str, ...]
    formats: tuple[str, str, str]  # fills of E4M3, E5M2 and BF16
    shades: tuple[str, str, str]  # fills of a heat map's cells, from a small share to 1
    line: str  # the colour of lines on heat maps, and of other marks that have to stand out


@dataclass(frozen=True)
class Look:
    """The contents of theme.yaml: the themes, and the settings of matplotlib."""

    light: Theme
    dark: Theme
    settings: dict[Any, Any]


LOOK = from_dict(Look, yaml.safe_load(Path(__file__).with_name("theme.yaml").read_text("utf-8")))
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")


@dataclass(frozen=True)
class Style:
    """The appearance of a series of numbers in a figure: its colour, dashes and marker."""

    colour: int | str  # an index into `Theme.series`, or the name of another field of Theme with a colour
    dashes: tuple[float, ...] = ()  # a solid line if empty
    marker: str = "o"

    @property
    def shade(self) -> str:
        return theme().series[self.colour] if isinstance(self.colour, int) else str(getattr(theme(), self.colour))


BASELINE = Style("text")  # the style of the baseline
NOISE = Style("text", (1, 1.6), "x")  # the style of A/A comparisons: trials that should be equal
QUIET = Style("quiet")  # a grey style for lines of less importance, such as trunks
STYLES = (
    Style(0, (5, 1.4), "s"),
    Style(1, (1.6, 1.2), "^"),
    Style(2, (6, 1.4, 1.4, 1.4), "D"),
    Style(3, (3, 1.2), "v"),
    Style(4, (6, 1.4, 1.4, 1.4, 1.4, 1.4), "P"),
    Style(5, (8, 2), "X"),
    Style(6, (1, 1), "<"),
)


def theme() -> Theme:
    return LOOK.light


def shades(of: Theme = LOOK.light) -> LinearSegmentedColormap:
    """Return the colour map for shares from 0 to 1; its colour for 0 differs from the background."""
    return LinearSegmentedColormap.from_list("shares", list(of.shades))


def ink(fill: tuple[float, float, float, float]) -> str:
    """Return the text's or the background's colour, whichever is readable on this fill (red, green, blue, alpha)."""
    return theme().text if np.dot(fill[:3], (0.3, 0.59, 0.11)) > 0.5 else theme().background


def draw_figure(picture: FigureResult) -> Figure:
    with _settings():
        figure = picture.draw()
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the layout takes most of the time and need not be computed again
        return figure


def svg(figure: Figure) -> str:
    """Return the figure as one `<svg>` element with text instead of paths; equal figures give equal bytes."""
    with _settings(), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fewbits"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("'DejaVu Sans'", FONTS)
    # Ids that the SVG refers to are numbered in their order; all other ids are removed.
    used = dict.fromkeys(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    names = {name: f"i{number}" for number, name in enumerate(used)}
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{names[found[1]]}"' if found[1] in names else "", text)
    text = re.sub(r'((?:url\(|href=")#)([^)"]+)', lambda found: found[1] + names[found[2]], text)
    return _compact(re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL))


def in_both_themes(light: str) -> str:
    """Return the SVG of a figure (`svg`) with the colours of the theme that the reader's browser prefers."""
    dark = _dark_colours()
    used = dict.fromkeys(colour for colour in _COLOUR.findall(light) if dark.get(colour, colour) != colour)
    names = {colour: f"--{number}" for number, colour in enumerate(used)}
    of_light = ";".join(f"{name}:{colour}" for colour, name in names.items())
    of_dark = ";".join(f"{name}:{dark[colour]}" for colour, name in names.items())
    style = f"<style>svg{{{of_light}}}@media(prefers-color-scheme:dark){{svg{{{of_dark}}}}}</style>"
    text = _COLOUR.sub(lambda found: f"var({names[found[0]]})" if found[0] in names else found[0], light)
    end = text.index(">") + 1  # the end of the opening tag
    return text[:end] + style + text[end:]


@cache
def _dark_colours() -> dict[str, str]:
    """Return {colour of the light theme: colour of the dark theme}, also for all shades of heat maps."""
    flat = ([*_flat(astuple(of)), *map(to_hex, shades(of)(range(256)))] for of in (LOOK.light, LOOK.dark))
    return dict(zip(*flat, strict=True))


def _flat(colours: tuple[Any, ...]) -> list[str]:
    return [one for some in colours for one in ([some] if isinstance(some, str) else some)]


def _compact(text: str) -> str:
    """Return a shorter SVG that looks the same: rounded numbers, the font stated once, and paths without spaces."""

    def rounded(number: re.Match[str]) -> str:
        value = float(number[0])
        return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) >= 1 else f"{value:.3g}"

    def path(found: re.Match[str]) -> str:
        text, last = "", ""
        for command, numbers in re.findall(r"([MLQCZmlqcz])\s*([^MLQCZmlqcz]*)", found[0]):
            # In SVG, further pairs of numbers after a command M or L mean L, so a repeated L is not needed.
            text += (" " if command == "L" and last in ("M", "L") else command) + numbers.strip()
            last = command
        return text

    def shorter(tag: re.Match[str]) -> str:
        text = " ".join(re.sub(r"\b\d+\.\d{3,}\b", rounded, tag[0]).split())
        text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", text)
        return re.sub(r'(?<= d=")[^"]*', path, text)

    text = text.replace(f"font-family: {FONTS}; ", "").replace("<svg ", f'<svg font-family="{FONTS}" ', 1)
    return re.sub(r">\s+<", "><", re.sub(r"<[^>]*>", shorter, text))


def png(figure: Figure, dots: int = 200) -> bytes:
    buffer = io.BytesIO()
    with _settings():
        figure.savefig(buffer, format="png", dpi=dots, metadata={"Software": None})
    return buffer.getvalue()


@contextmanager
def _settings() -> Iterator[None]:
    """Use matplotlib's defaults, theme.yaml's settings and the theme's colours within a `with` statement."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOK.settings)
        yield
