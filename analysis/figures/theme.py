"""The appearance of all figures: one width, two themes, seven styles of series, and SVG and PNG files.

A figure is drawn on request, once for each theme: `themed` calls `FigureResult.draw` while the theme is active, so that
the helpers in this folder and matplotlib's defaults use the theme's colours. pyplot is not used, and matplotlib's
settings are restored after each call. Figures are WIDTH inches wide. Text has at least SMALL points, so it is readable
on a phone that shows the figure 360 pixels wide.

Series differ in colour, dashes and markers. The colours are those of Okabe and Ito, which colour-blind readers can
tell apart, darker on white and lighter on black.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import yaml
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fewbits.analysis.report.items import FigureResult
from fewbits.common.from_dict import from_dict, one_of

Array = NDArray[np.float64]

WIDTH = 5.6  # inches
TEXT, SMALL = 9.0, 8.2  # points, as in theme.yaml; SMALL is 7.3 pixels in a figure 360 pixels wide
# The fonts that an SVG names, for browsers. Matplotlib computes layouts with DejaVu Sans, which is wider than these.
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    name: str
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
    """The contents of theme.yaml: the themes, and the settings of matplotlib that both themes share."""

    themes: tuple[Theme, ...]
    settings: dict[Any, Any]


_LOOK = from_dict(Look, yaml.safe_load(Path(__file__).with_name("theme.yaml").read_text("utf-8")))
THEMES = {theme.name: theme for theme in _LOOK.themes}
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_THEME: ContextVar[Theme] = ContextVar("theme", default=THEMES["light"])


@dataclass(frozen=True)
class Style:
    """The appearance of a series of numbers in a figure: its colour, dashes and marker."""

    colour: int | str  # an index into `Theme.series`, or the name of another field of Theme with a colour
    dashes: tuple[float, ...] = ()  # a solid line if empty
    marker: str = "o"

    @property
    def shade(self) -> str:
        """The colour in the active theme, as #rrggbb."""
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


# -------------------------------------------------------------------------------- themes and files


def theme() -> Theme:
    """Return the active theme."""
    return _THEME.get()


def themed(picture: FigureResult, name: str) -> Figure:
    """Draw a figure, with its final layout, in the theme with this name. The theme is active only during the call."""
    one_of("theme", name, THEMES)
    token = _THEME.set(THEMES[name])
    try:
        with _settings(THEMES[name]):
            figure = picture.draw()
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # the layout takes most of the time and need not be computed again
            return figure
    finally:
        _THEME.reset(token)


def svg(figure: Figure) -> str:
    """Return the figure as one `<svg>` element with text instead of paths; equal figures give equal bytes."""
    with _settings(THEMES["light"]), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fewbits"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("'DejaVu Sans'", FONTS)
    # Ids that the SVG refers to are numbered in their order: matplotlib's ids depend on colours, so they would differ
    # between themes. All other ids are removed.
    used = dict.fromkeys(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    names = {name: f"i{number}" for number, name in enumerate(used)}
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{names[found[1]]}"' if found[1] in names else "", text)
    text = re.sub(r'((?:url\(|href=")#)([^)"]+)', lambda found: found[1] + names[found[2]], text)
    return _compact(re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL))


def in_both_themes(light: str, dark: str) -> str:
    """Return one SVG that shows the colours of `light` or `dark`, as the reader's browser prefers.

    light, dark: SVGs of the same figure, as `svg` returns them, in the two themes. The result is half as large as both
    together. Return "" if `light` and `dark` differ in more than their colours.
    """
    if _COLOUR.sub("", light) != _COLOUR.sub("", dark):
        return ""
    pairs = list(zip(_COLOUR.findall(light), _COLOUR.findall(dark), strict=True))
    names = {pair: f"--{number}" for number, pair in enumerate(dict.fromkeys(p for p in pairs if p[0] != p[1]))}
    of_light, of_dark = (";".join(f"{name}:{pair[theme]}" for pair, name in names.items()) for theme in (0, 1))
    style = f"<style>svg{{{of_light}}}@media(prefers-color-scheme:dark){{svg{{{of_dark}}}}}</style>"
    colours = iter(f"var({names[pair]})" if pair in names else pair[0] for pair in pairs)
    text = _COLOUR.sub(lambda _: next(colours), light)
    end = text.index(">") + 1  # the end of the opening tag
    return text[:end] + style + text[end:]


def _compact(text: str) -> str:
    """Return a shorter SVG that looks the same: rounded coordinates, the font stated once, and paths without spaces.

    Numbers of at least 1 are rounded to 0.01 px, and smaller numbers to three digits.
    """

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
    """Return the figure as a PNG. dots: pixels per inch."""
    buffer = io.BytesIO()
    with _settings(THEMES["light"]):
        figure.savefig(buffer, format="png", dpi=dots, metadata={"Software": None})
    return buffer.getvalue()


@contextmanager
def _settings(of: Theme) -> Iterator[None]:
    """Use matplotlib's defaults, theme.yaml's settings and the theme's colours within a `with` statement."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        colours: dict[Any, Any] = {"figure.facecolor": of.background, "grid.color": of.grid}
        colours |= dict.fromkeys(
            ("text.color", "axes.titlecolor", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), of.text
        )
        colours |= dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), of.quiet)
        matplotlib.rcParams.update(_LOOK.settings | colours)
        yield


# -------------------------------------------------------------------------------- shades


def shades() -> LinearSegmentedColormap:
    """Return the colour map for shares from 0 to 1; its colour for 0 differs from the background."""
    return LinearSegmentedColormap.from_list("shares", list(theme().shades))


def ink(fill: tuple[float, float, float, float]) -> str:
    """Return black or white, whichever is readable on this fill (red, green, blue, alpha from 0 to 1)."""
    return "#1b1f24" if np.dot(fill[:3], (0.3, 0.59, 0.11)) > 0.5 else "#ffffff"
