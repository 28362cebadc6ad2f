"""How figures look: one width, two themes, and the drawings that figures share.

A picture is drawn when it is asked for, once for each theme: `themed` calls its `draw` while the theme's colours are in
force, so that the helpers here, and matplotlib's own defaults, take them from it. Nothing of pyplot is used and no
setting outlives a call. Figures are WIDTH inches wide with letters of at least SMALL points, which are still read when
a telephone shows them 360 pixels wide; what is beside each other here is beside each other there.

Series differ in colour, dashes and markers. The colours are Okabe and Ito's, darker on white and lighter on black.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import ScaledTranslation, Transform
from numpy.typing import NDArray

from fewbits.analysis.results import FigureResult
from fewbits.common.from_dict import one_of

Array = NDArray[np.float64]

WIDTH = 5.6  # inches
TEXT, SMALL = 9.0, 8.2  # points; SMALL / (72 · WIDTH) of 360 pixels is 7.3
# What a browser has; positions are measured with DejaVu Sans, which is wider than all of them.
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    name: str
    background: str
    text: str
    quiet: str  # second to the text: spines, ticks, notes
    grid: str
    series: tuple[str, ...]
    formats: tuple[str, str, str]  # fill of what is E4M3, E5M2, BF16
    full: str  # of a heat map's cell that holds everything; the background's colour holds nothing
    line: str  # that must be seen above a heat map


THEMES = {
    theme.name: theme
    for theme in (
        Theme(
            name="light",
            background="#ffffff",
            text="#1b1f24",
            quiet="#59636e",
            grid="#e4e7eb",
            series=("#0072b2", "#d55e00", "#00805d", "#a9508a", "#8a6a00", "#3a3fb5", "#b3123a"),
            formats=("#cfe5f4", "#fbdcc0", "#9aa3ad"),
            full="#08306b",
            line="#d55e00",
        ),
        Theme(
            name="dark",
            background="#14171a",
            text="#e8eaed",
            quiet="#a3abb4",
            grid="#2b3138",
            series=("#56b4e9", "#f5853f", "#2cc79a", "#e39ac3", "#e6c229", "#a6a8ff", "#ff8a9a"),
            formats=("#1d4965", "#74430f", "#59616a"),
            full="#d6ecff",
            line="#f5853f",
        ),
    )
}
_THEME: ContextVar[Theme] = ContextVar("theme", default=THEMES["light"])


@dataclass(frozen=True)
class Look:
    """How a series is told from others."""

    colour: int | None  # of the theme's series; None: the text's, for what others are compared with
    dashes: tuple[float, ...] = ()  # none: a solid line
    marker: str = "o"

    @property
    def shade(self) -> str:
        return theme().text if self.colour is None else theme().series[self.colour]


BASELINE = Look(None)
LOOKS = (
    Look(0, (5, 1.4), "s"),
    Look(1, (1.6, 1.2), "^"),
    Look(2, (6, 1.4, 1.4, 1.4), "D"),
    Look(3, (3, 1.2), "v"),
    Look(4, (6, 1.4, 1.4, 1.4, 1.4, 1.4), "P"),
    Look(5, (8, 2), "X"),
    Look(6, (1, 1), "<"),
)


# -------------------------------------------------------------------------------- themes and files


def theme() -> Theme:
    """The one in force."""
    return _THEME.get()


def themed(picture: FigureResult, name: str) -> Figure:
    """The picture drawn in the theme of that name. Draws at once: what is drawn later would not know the theme."""
    one_of("theme", name, THEMES)
    token = _THEME.set(THEMES[name])
    try:
        with _settings(THEMES[name]):
            figure = picture.draw()
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # it is laid out: not again for each file
            return figure
    finally:
        _THEME.reset(token)


def svg(figure: Figure) -> str:
    """The figure as one `<svg>` element whose text is text: the same bytes for the same figure."""
    # Ids of its own for each theme: both may stand in one page, and clip paths of what is hidden do not clip
    salt = to_hex(figure.get_facecolor())
    with _settings(THEMES["light"]), matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("'DejaVu Sans'", FONTS)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)


def png(figure: Figure, dots: int = 200) -> bytes:
    """The figure as a PNG of so many dots to the inch."""
    buffer = io.BytesIO()
    with _settings(THEMES["light"]):
        figure.savefig(buffer, format="png", dpi=dots, metadata={"Software": None})
    return buffer.getvalue()


@contextmanager
def _settings(of: Theme) -> Iterator[None]:
    """matplotlib's own defaults, whatever the user's are, and the theme's; as before afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "font.family": "DejaVu Sans",
                "font.size": TEXT,
                "text.hinting": "none",  # so that text is as wide at one resolution as it is at another
                "axes.titlesize": TEXT,
                "axes.titleweight": "bold",
                "axes.titlelocation": "left",
                "axes.labelsize": SMALL,
                "xtick.labelsize": SMALL,
                "ytick.labelsize": SMALL,
                "legend.fontsize": SMALL,
                "figure.facecolor": of.background,
                "axes.facecolor": "none",
                "savefig.facecolor": "auto",
                "text.color": of.text,
                "axes.titlecolor": of.text,
                "axes.labelcolor": of.text,
                "axes.edgecolor": of.quiet,
                "xtick.color": of.quiet,
                "ytick.color": of.quiet,
                "xtick.labelcolor": of.text,
                "ytick.labelcolor": of.text,
                "grid.color": of.grid,
                "grid.linewidth": 0.7,
                "axes.grid": True,
                "axes.axisbelow": True,
                "axes.linewidth": 0.7,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "xtick.major.size": 3,
                "ytick.major.size": 3,
                "lines.linewidth": 1.3,
                "lines.markersize": 4,
                "legend.frameon": False,
                "legend.handlelength": 2.6,
                "legend.columnspacing": 1.4,
                "figure.constrained_layout.h_pad": 0.05,
                "figure.constrained_layout.w_pad": 0.05,
            }
        )
        yield


# -------------------------------------------------------------------------------- what figures are made of


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, list[list[Axes]]]:
    """A figure so many inches high, and its panels, row by row. options: as Figure.subplots has them."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:  # a fixed number of ticks: one that goes by the room there is moves the layout, and that it
        axes.locator_params(nbins=5)
    return figure, [list(row) for row in grid]


def canvas(height: float) -> tuple[Figure, Axes]:
    """A figure to draw in by points: from (0, 0) below on the left, WIDTH · 72 to the right, height · 72 up."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 72 * WIDTH), ylim=(0, 72 * height))
    axes.axis("off")
    return figure, axes


def curve(
    axes: Axes,
    look: Look,
    x: Array,
    mean: Array,
    band: tuple[Array, Array] | None = None,
    *,
    points: bool = False,
    apart: bool = True,
) -> None:
    """A mean over seeds with its band. points: so few that each is marked, with a bar in place of the band; and apart,
    by some points, from those of other series."""
    points = points or x.size == 1
    place: Transform = axes.transData
    if points and apart:
        aside = 2.2 * (-3 if look.colour is None else look.colour - 2)
        axes.margins(x=0.08)
        place = place + ScaledTranslation(aside / 72, 0, axes.figure.dpi_scale_trans)
    marker = look.marker if points else ""
    axes.plot(x, mean, color=look.shade, dashes=look.dashes or (None, None), marker=marker, transform=place)
    if band is not None and points:
        axes.vlines(x, *band, color=look.shade, linewidth=1.1, transform=place)
    elif band is not None:
        axes.fill_between(x, *band, color=look.shade, alpha=0.13, linewidth=0)
    if points:  # what is shifted does not move the axes' limits by itself
        edges = (mean, *(band or ()))
        axes.update_datalim(np.column_stack([np.tile(x, len(edges)), np.concatenate(edges)]))
        axes.autoscale_view()


def legend(
    figure: Figure, entries: Sequence[tuple[str, Look]], *, columns: int = 3, extra: Sequence[Line2D] = ()
) -> None:
    """Above all panels."""
    lines = [
        Line2D([], [], color=look.shade, dashes=look.dashes or (None, None), marker=look.marker, label=name)
        for name, look in entries
    ]
    handles = [*lines, *extra]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(columns, len(handles)), borderpad=0.1)


def hollow(label: str) -> Line2D:
    """What the paper's numbers are drawn as, for a legend."""
    return Line2D([], [], linestyle="", marker="o", markerfacecolor="none", markeredgecolor=theme().quiet, label=label)


def instead(axes: Axes, words: str) -> None:
    """In place of what a panel has no data for: why."""
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=theme().quiet, fontsize=SMALL)


def percent(digits: int | None = None, *, signed: bool = False) -> FuncFormatter:
    """Parts as percent, without more digits than it takes; the axis's label says %."""

    def spell(value: float, _: object) -> str:
        text = f"{100 * value:.{5 if digits is None else digits}f}"
        text = text.rstrip("0").rstrip(".") if digits is None else text
        text = "0" if float(text) == 0 else text
        return (f"+{text}" if signed and float(text) > 0 else text).replace("-", "−")

    return FuncFormatter(spell)


def counted(value: float, _: object = None) -> str:
    """A great number in few letters: 300 k, 1.2 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.4g}"


def tokens_axis(axes: Axes, label: bool = True) -> None:
    axes.xaxis.set_major_formatter(FuncFormatter(counted))
    axes.locator_params(axis="x", nbins=4)
    if label:
        axes.set_xlabel("tokens")
