"""Test the style of figures: contrast in both themes, also for colour-blind readers, and text that stays SVG text.

A figure that is drawn twice also has to give the same bytes.
"""

import re
from functools import cache
from itertools import combinations
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from fewbits.analysis.figures.curves import LEAST, Line, Panel, PaperMark, Rule, curve_figure
from fewbits.analysis.figures.heat_map import HeatMap, heat_map_figure, histogram_row
from fewbits.analysis.figures.panels import percent
from fewbits.analysis.figures.theme import (
    LOOK,
    SMALL,
    STYLES,
    WIDTH,
    Theme,
    draw_figure,
    in_both_themes,
    ink,
    shades,
    svg,
)
from fewbits.analysis.report.items import FigureResult

X = np.linspace(0, 1e6, 20)
COLOUR = re.compile(r"#[0-9a-f]{6}")
# Matrices from RGB colours to those that red-blind and green-blind people see (Machado, Oliveira and Fernandes 2009,
# at full severity).
BLIND = (
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
)


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


@themes
def test_text_is_read_on_what_formats_are_filled_with(theme: Theme) -> None:
    assert all(contrast(theme.text, fill) >= 4.5 for fill in theme.formats)


@themes
@pytest.mark.parametrize("blind", BLIND, ids=["red", "green"])
def test_series_differ_for_the_colour_blind_too(theme: Theme, blind: np.ndarray) -> None:
    """Check that two series whose colours look alike to colour-blind readers differ in dashes and markers."""
    seen = [blind @ np.array(to_rgb(theme.series[int(style.colour)])) for style in STYLES]
    for (i, a), (j, b) in combinations(enumerate(seen), 2):
        alike = np.linalg.norm(a - b) < 0.12
        assert not alike or (STYLES[i].dashes != STYLES[j].dashes and STYLES[i].marker != STYLES[j].marker)


def test_no_two_series_share_a_marker_or_dashes() -> None:
    assert len({style.marker for style in STYLES}) == len({style.dashes for style in STYLES}) == len(STYLES)


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
def test_settings_of_the_user_neither_show_nor_change(picture: FigureResult, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drawn(picture)
    settings: dict[str, object] = {"font.size": 30.0, "text.color": "red", "svg.fonttype": "path"}
    for key, value in settings.items():
        monkeypatch.setitem(matplotlib.rcParams, key, value)  # type: ignore[misc]
    assert svg(draw_figure(picture)) == expected
    assert matplotlib.rcParams["font.size"] == 30.0


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


def test_colours_of_the_light_theme_name_one_colour_of_the_dark_theme() -> None:
    pairs = {}
    for name in ("background", "text", "quiet", "grid", "line"):
        pairs[getattr(LOOK.light, name)] = getattr(LOOK.dark, name)
    for name in ("series", "formats", "shades"):
        for light, dark in zip(getattr(LOOK.light, name), getattr(LOOK.dark, name), strict=True):
            assert pairs.setdefault(light, dark) == dark


@pytest.mark.parametrize("share", np.linspace(0.05, 1, 20))
def test_numbers_are_read_on_the_shades_of_heat_maps_in_both_themes(share: float) -> None:
    chosen = ink(shades()(share))
    swapped = LOOK.dark.text if chosen == LOOK.light.text else LOOK.dark.background
    assert contrast(chosen, to_hex(shades()(share))) >= 3
    assert contrast(swapped, to_hex(shades(LOOK.dark)(share))) >= 3


@pictures
def test_letters_are_read_on_a_telephone(picture: FigureResult) -> None:
    """Check that the smallest text is higher than seven pixels on a screen that is 360 pixels wide."""
    sizes = [float(size) for size in re.findall(r"(?:font|font-size): (?:\d+ )?([\d.]+)px", drawn(picture))]
    assert sizes
    assert min(sizes) >= SMALL
    assert 360 * SMALL / (72 * WIDTH) > 7
    assert WIDTH <= 7


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.001, "+0.1"), (-0.0045, "−0.45"), (0.000015, "+0.0015"), (1.0, "+100")]
)
def test_percent_has_as_many_digits_as_it_takes(value: float, text: str) -> None:
    assert percent(signed=True)(value) == text


def test_rows_show_their_own_shares_and_the_last_bin_stands_apart() -> None:
    figure = draw_figure(PICTURES["map"])
    axes = figure.axes[0]
    assert len(axes.collections[0].get_paths()) == 6  # each of the six rows has counts in one cell only
    assert [tick.get_text() for tick in axes.get_xticklabels()][-1] == ">10"


def test_points_of_one_seed_lie_within_the_axes() -> None:
    line = Line(np.array([4e4, 5e4]), np.array([-0.2, 0.3]), STYLES[0], points=True, side_by_side=True)
    axes = curve_figure([[Panel(lines=(line,))]]).axes[0]
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert 3e4 < left < 4e4 < 5e4 < right < 6e4
    assert bottom < -0.2 < 0.3 < top


def test_what_the_paper_prints_far_off_is_an_arrow_and_does_not_flatten_ours() -> None:
    axes = curve_figure([[Panel(lines=(Line(X, X / 1e6, STYLES[0]),), paper=(PaperMark(50.0, STYLES[0]),))]]).axes[0]
    (mark,) = (one for one in axes.lines if not one.get_clip_on())
    assert mark.get_marker() == r"$\uparrow$"
    assert axes.get_ylim()[1] < 2


def test_changes_that_are_zero_have_no_axis_of_rounding() -> None:
    panel = Panel(lines=(Line(X, 0 * X, STYLES[0]),), rules=(Rule(0, "text"),), y_axis="change")
    assert curve_figure([[panel]]).axes[0].get_ylim() == (-LEAST, LEAST)


def test_a_panel_without_lines_gives_the_reason() -> None:
    axes = curve_figure([[Panel("loss", empty="not run at this scale (smoke)")]]).axes[0]
    assert [text.get_text() for text in axes.texts] == ["not run at this scale (smoke)"]


def test_an_svg_has_coordinates_to_a_hundredth_and_its_texts_as_written() -> None:
    figure = Figure(figsize=(3, 2))
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    axes.plot([0, 1 / 3, 1], [0, np.pi, 1])
    axes.set_title("0.0009126  and 17.03125")
    root = ElementTree.fromstring(svg(figure))
    paths = [found.get("d", "") for found in root.iter("{http://www.w3.org/2000/svg}path")]
    assert any("." in path for path in paths)
    assert not re.search(r"\b[1-9]\d*\.\d{3}", " ".join(paths))
    assert "0.0009126  and 17.03125" in {found.text for found in root.iter("{http://www.w3.org/2000/svg}text")}
