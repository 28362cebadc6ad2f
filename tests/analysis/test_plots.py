"""The look of figures: legible in both themes, by the colour-blind too; text as text; the same bytes each time."""

import re
from itertools import combinations
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from fewbits.analysis import heat, plots
from fewbits.analysis.heat import HeatRow
from fewbits.analysis.plots import LOOKS, SMALL, THEMES, WIDTH, Theme, png, svg, themed
from fewbits.analysis.results import FigureResult

X = np.linspace(0, 1e6, 20)
EDGES = np.append(np.arange(21) * 0.005, np.inf)
# What is left of colours for the red- and the green-blind (Machado, Oliveira and Fernandes 2009, at full severity)
BLIND = (
    np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
)


def draw_curves() -> Figure:
    figure, ((left, right),) = plots.panels(1, 2, 2.4)
    for i, look in enumerate(LOOKS):
        plots.curve(left, look, X, i + X / 1e6, (i + X / 1e6 - 0.1, i + X / 1e6 + 0.1))
        plots.curve(right, look, X[:3], X[:3], (X[:3] - 1, X[:3] + 1), points=True)
    plots.tokens_axis(left)
    plots.legend(figure, [(f"arm {i}", look) for i, look in enumerate(LOOKS)], extra=[plots.hollow("the paper's")])
    return figure


def draw_map() -> Figure:
    figure, ((axes,),) = plots.panels(1, 1, 2.4)
    rows = [HeatRow(f"fc{i} input", np.eye(21)[3 * i], f"layer {i // 3}") for i in range(6)]
    heat.heat_map(axes, rows, EDGES, 0.045)
    heat.shades_key(figure, [axes], "share", "threshold")
    return figure


PICTURES = {"curves": FigureResult(draw_curves, ()), "map": FigureResult(draw_map, ())}
pictures = pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
themes = pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)


def luminance(colour: str) -> float:
    """As the web's accessibility guidelines define it."""
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
    """In what colour is left, or else in dashes and markers both."""
    seen = [blind @ to_rgb(theme.series[look.colour]) for look in LOOKS if look.colour is not None]
    for (i, a), (j, b) in combinations(enumerate(seen), 2):
        alike = np.linalg.norm(a - b) < 0.12
        assert not alike or (LOOKS[i].dashes != LOOKS[j].dashes and LOOKS[i].marker != LOOKS[j].marker)


def test_no_two_series_share_a_marker_or_dashes() -> None:
    assert len({look.marker for look in LOOKS}) == len({look.dashes for look in LOOKS}) == len(LOOKS)


@pictures
def test_files_have_the_same_bytes_each_time(picture: FigureResult) -> None:
    assert svg(themed(picture, "light")) == svg(themed(picture, "light"))
    assert png(themed(picture, "dark")) == png(themed(picture, "dark"))


@pictures
def test_settings_of_the_user_neither_show_nor_change(picture: FigureResult, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = svg(themed(picture, "light"))
    settings: dict[str, object] = {"font.size": 30.0, "text.color": "red", "svg.fonttype": "path"}
    for key, value in settings.items():
        monkeypatch.setitem(matplotlib.rcParams, key, value)  # type: ignore[misc]
    assert svg(themed(picture, "light")) == expected
    assert matplotlib.rcParams["font.size"] == 30.0


@pictures
def test_the_svg_is_one_element_with_text_as_text_in_the_systems_font(picture: FigureResult) -> None:
    text = svg(themed(picture, "light"))
    root = ElementTree.fromstring(text)
    words = {found.text for found in root.iter("{http://www.w3.org/2000/svg}text")}
    assert text.startswith("<svg")
    assert words & {"arm 0", "fc0 input"}
    assert "system-ui" in text
    assert "DejaVu" not in text
    assert not re.search(r"\d{4}-\d\d-\d\d", text)  # no date


@pictures
def test_two_themes_in_one_page_share_no_ids(picture: FigureResult) -> None:
    light, dark = (set(re.findall(r' id="([^"]+)"', svg(themed(picture, name)))) for name in THEMES)
    assert not light & dark


@pictures
@themes
def test_letters_are_read_on_a_telephone(picture: FigureResult, theme: Theme) -> None:
    """At 360 pixels the smallest is above seven of them."""
    figure = themed(picture, theme.name)
    sizes = [float(size) for size in re.findall(r"(?:font|font-size): (?:\d+ )?([\d.]+)px", svg(figure))]
    assert sizes
    assert min(sizes) >= SMALL
    assert 360 * SMALL / (72 * WIDTH) > 7
    assert figure.get_figwidth() <= 7


@themes
def test_text_spines_and_ticks_take_the_themes_colours(theme: Theme) -> None:
    text = svg(themed(PICTURES["curves"], theme.name))
    (other,) = (one for one in THEMES.values() if one is not theme)
    assert theme.background in text
    assert theme.text in text
    assert not {other.background, other.text, other.quiet} & set(re.findall(r"#[0-9a-f]{6}", text))


def test_an_unknown_theme_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"sepia.*light, dark"):
        themed(PICTURES["map"], "sepia")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.001, "+0.1"), (-0.0045, "−0.45"), (0.000015, "+0.0015"), (1.0, "+100")]
)
def test_percent_has_as_many_digits_as_it_takes(value: float, text: str) -> None:
    assert plots.percent(signed=True)(value) == text


def test_rows_show_their_own_shares_and_the_last_bin_stands_apart() -> None:
    figure = themed(PICTURES["map"], "light")
    axes = figure.axes[0]
    assert len(axes.collections[0].get_paths()) == 6  # one cell for each row, where its counts are
    assert [tick.get_text() for tick in axes.get_xticklabels()][-1] == ">10"


def test_points_of_one_seed_lie_within_the_axes() -> None:
    _, ((axes,),) = plots.panels(1, 1, 2)
    plots.curve(axes, LOOKS[0], np.array([4e4, 5e4]), np.array([-0.2, 0.3]), points=True)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    assert 3e4 < left < 4e4 < 5e4 < right < 6e4
    assert bottom < -0.2 < 0.3 < top
