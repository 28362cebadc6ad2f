"""Test the style of figures: contrast in both themes, and text that stays SVG text."""

import re
from functools import cache
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fewbits.analysis.figures.heat_map import HeatMap, heat_map_figure, histogram_row
from fewbits.analysis.figures.panels import Line, Panel, PaperMark, curve_figure
from fewbits.analysis.figures.theme import (
    LOOK,
    STYLES,
    Theme,
    draw_figure,
    in_both_themes,
    svg,
)
from fewbits.analysis.report.items import FigureResult

X = np.linspace(0, 1e6, 20)
COLOUR = re.compile(r"#[0-9a-f]{6}")


def draw_curves() -> Figure:
    left = [
        Line(X, i + X / 1e6, style, f"arm {i}", (i + X / 1e6 - 0.1, i + X / 1e6 + 0.1))
        for i, style in enumerate(STYLES)
    ]
    right = [Line(X[:3], X[:3], style, "", (X[:3] - 1, X[:3] + 1), side_by_side=True) for style in STYLES]
    papers = (PaperMark(3e4, STYLES[0]), PaperMark(1e9, STYLES[1]))
    return curve_figure([[Panel("levels", tuple(left), x_axis="tokens"), Panel("points", tuple(right), paper=papers)]])


def draw_map() -> Figure:
    rows = tuple(histogram_row(f"fc{i} input", np.eye(21)[3 * i], f"layer {i // 3}") for i in range(6))
    columns = (*("" if i % 4 else f"{i / 2:g}" for i in range(20)), ">10")
    return heat_map_figure([HeatMap(rows, columns, open_bin=True, threshold=9)], key="share", threshold="threshold")


PICTURES = {"curves": FigureResult(draw_curves, ()), "map": FigureResult(draw_map, ())}
pictures = pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
THEMES = {"light": LOOK.light, "dark": LOOK.dark}
themes = pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, as the web's accessibility guidelines (WCAG) define it."""
    parts = np.array(to_rgb(colour))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@themes
def test_lines_and_text_stand_out_from_the_background(theme: Theme) -> None:
    assert all(contrast(colour, theme.background) >= 3 for colour in (*theme.series, theme.line))
    assert contrast(theme.text, theme.background) >= 7
    assert contrast(theme.quiet, theme.background) >= 4.5


@cache
def drawn(picture: FigureResult) -> str:
    return svg(draw_figure(picture))


def shown(both: str, theme: int) -> str:
    """Return an SVG in both themes as a browser shows it in the light theme (0) or the dark one (1)."""
    style = re.search(r"<style>svg\{(.*)\}@media\(prefers-color-scheme:dark\)\{svg\{(.*)\}\}</style>", both)
    assert style
    colours = dict(one.split(":") for one in style[theme + 1].split(";"))
    return re.sub(r"var\((--\d+)\)", lambda found: colours[found[1]], both.replace(style[0], ""))


@pictures
def test_the_svg_is_one_element_with_text_as_text_in_the_systems_font(picture: FigureResult) -> None:
    text = drawn(picture)
    root = ElementTree.fromstring(text)
    words = {found.text for found in root.iter("{http://www.w3.org/2000/svg}text")}
    assert text.startswith("<svg")
    assert words & {"arm 0", "fc0 input"}
    assert "system-ui" in text
    assert "DejaVu" not in text
    assert not re.search(r"\d{4}-\d\d-\d\d", text)  # a date would change the bytes


@pictures
def test_one_svg_has_the_colours_of_both_themes(picture: FigureResult) -> None:
    light = drawn(picture)
    both = in_both_themes(light)
    assert shown(both, 0) == light
    dark = shown(both, 1)
    assert not {LOOK.light.background, LOOK.light.text, LOOK.light.quiet, *LOOK.light.series} & set(
        COLOUR.findall(dark)
    )
    assert LOOK.dark.background in dark
    assert LOOK.dark.text in dark
    assert len(both) < 1.2 * len(light)
