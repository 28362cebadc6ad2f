"""Draw grids of panels with legends: curves over tokens, steps or any other number, and bars.

A line is usually a mean over seeds, with a band (a range or an interval); a line of few points has marks and error bars
instead. The paper's numbers for the end of training are hollow marks to the right of a panel, or arrows at its edge if
they would make the range of the y axis several times as large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter
from matplotlib.transforms import ScaledTranslation, Transform

from fewbits.analysis.figures.theme import SMALL, WIDTH, Array, Style, theme

PLACEHOLDER = 32  # the most characters in a line of the text in an empty panel


def panels(rows: int, columns: int, height: float, **options: Any) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure of this height in inches with a grid of panels, and the panels by row; options: of subplots."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:  # by default, the number of ticks depends on the space, which would change the layout
        axes.locator_params(nbins=5)
    return figure, [list(row) for row in grid]


def line_key(label: str, style: Style, width: float | None = None) -> Line2D:
    """Return the legend's entry for a series. width: the line's width; if it is given, the entry has no marker."""
    dashes: Any = style.dashes or (None, None)
    marker = style.marker if width is None else ""
    return Line2D([], [], color=style.shade, dashes=dashes, marker=marker, label=label, linewidth=width)


def rule_key(label: str, dashes: tuple[float, ...] = ()) -> Line2D:
    """Return the legend's entry for a reference line, such as a margin; dashes: as for Line2D, () is a solid line."""
    pattern: Any = dashes or (None, None)
    return Line2D([], [], color=theme().quiet, linewidth=0.9, dashes=pattern, label=label)


def paper_key(label: str = "the paper's") -> Line2D:
    return Line2D([], [], linestyle="", marker="o", markerfacecolor="none", markeredgecolor=theme().quiet, label=label)


def legend(figure: Figure, keys: Sequence[Artist], columns: int = 3) -> None:
    """Add a legend with these entries above all panels, in at most `columns` columns; without entries, add nothing."""
    if keys:
        figure.legend(handles=list(keys), loc="outside upper left", ncols=min(columns, len(keys)), borderpad=0.1)


def placeholder(axes: Axes, reason: str) -> None:
    axes.grid(False)
    axes.set(xticks=[], yticks=[])
    lines = fill(reason, PLACEHOLDER)
    text = axes.text(0.5, 0.5, lines, transform=axes.transAxes, ha="center", va="center", color=theme().quiet)
    text.set(fontsize=SMALL, in_layout=False)  # a long reason must not make the panels narrow


def rows_of_labels(axes: Axes, labels: Sequence[str]) -> None:
    """Label the rows of a panel, without ticks and grid; row i is at y = i."""
    axes.set_yticks(range(len(labels)), list(labels))
    axes.tick_params(axis="y", length=0)
    axes.grid(False)


def percent(*, signed: bool = False) -> FuncFormatter:
    """Return a formatter that shows fractions as percent, for example 0.015 as 1.5; the axis's label has the % sign."""

    def spell(value: float, _: object) -> str:
        text = f"{100 * value:.5f}".rstrip("0").rstrip(".")
        text = "0" if float(text) == 0 else text
        return (f"+{text}" if signed and float(text) > 0 else text).replace("-", "−")

    return FuncFormatter(spell)


def bar_figure(
    groups: Sequence[str], panels_of: Mapping[str, Mapping[str, Sequence[float]]], styles: Mapping[str, Style]
) -> Figure:
    """Draw panels of grouped bars; panels_of[title][series] are the heights, one for each group (NaN: no bar)."""
    figure, grid = panels(len(panels_of), 1, 2.3 * len(panels_of), sharex=True)
    for (axes,), (title, found) in zip(grid, panels_of.items(), strict=True):
        for i, (name, values) in enumerate(found.items()):
            centres = np.arange(len(groups)) + 0.27 * (i - (len(found) - 1) / 2)
            bars = axes.bar(centres, values, 0.25, color=styles[name].shade)
            texts = ["" if np.isnan(value) else f"{value:.2g}" for value in values]
            axes.bar_label(bars, texts, fontsize=SMALL - 1.4, padding=1)
        axes.set_title(title)
        axes.grid(axis="x", visible=False)
    grid[-1][0].set_xticks(range(len(groups)), list(groups))
    legend(figure, [Patch(color=style.shade, label=name) for name, style in styles.items()])
    return figure


# ------------------------------------------------------------------------------------------------ curves

FEW = 12  # lines with at most this number of points have a mark at each point
FARTHEST = 4.0  # the factor by which the paper's numbers may extend the range of a panel's y axis
LEAST = 1e-5  # if all changes in a panel are smaller than LEAST, its y axis is from -LEAST to LEAST
ASIDE = 0.12  # the margin of an x axis along which points are shifted, as a fraction of its length
ROW = 1.62  # the height of a row of panels in inches
# The kinds of axes: plain numbers, a log scale (x only), numbers of tokens, and fractions shown as percent without
# ("percent") or with ("change") a plus sign, and no ticks (x only).
Axis = Literal["number", "log", "tokens", "percent", "change", "none"]
WEIGHTS = {"quiet": 0.8, "text": 1.0, "line": 1.0}  # widths of reference lines by their colour


@dataclass(frozen=True)
class Line:
    """A series of numbers that is drawn as one line in a panel."""

    x: Array
    y: Array
    style: Style
    label: str = ""  # in the legend; a line without a label is not in the legend
    band: tuple[Array, Array] | None = None  # the band's lower and upper edges
    points: bool | None = None  # whether each point is marked; None: if there are at most FEW points
    side_by_side: bool = False  # shift marked points so that points of other lines at the same x stay visible
    secondary: bool = False  # list the line after all others in the legend
    hollow: bool = False  # large open marks, for numbers of the paper
    width: float | None = None  # the line's width in points; None: matplotlib's setting

    @property
    def marked(self) -> bool:
        return self.x.size == 1 or (self.x.size <= FEW if self.points is None else self.points)


@dataclass(frozen=True)
class Rule:
    """A straight reference line across a panel: horizontal at y = value, or upright at x = value."""

    value: float
    colour: str = "quiet"  # a key of WEIGHTS: the name of one of the theme's colours
    label: str = ""  # in the legend; a line without a label is not in the legend
    upright: bool = False
    dashes: tuple[float, ...] = ()


@dataclass(frozen=True)
class PaperMark:
    """A number of the paper: a hollow mark to the right of the panel, in the style of its arm."""

    value: float
    style: Style


@dataclass(frozen=True)
class Panel:
    """The contents of one panel: its lines, its reference lines, the paper's numbers, and its axes."""

    title: str = ""
    lines: tuple[Line, ...] = ()
    rules: tuple[Rule, ...] = ()
    paper: tuple[PaperMark, ...] = ()
    x_label: str = ""
    y_label: str = ""
    x_axis: Axis = "number"
    y_axis: Axis = "number"
    y_limits: tuple[float | None, float | None] = (None, None)  # bottom and top; None: as the lines need
    x_ticks: int = 4  # the largest number of intervals between ticks of an axis of tokens
    branches_at: float | None = None  # the x at which arms branch from a trunk; a long trunk is not shown in full
    empty: str = ""  # the reason for an empty panel; if it is set, no line is drawn


def curve_figure(
    rows: Sequence[Sequence[Panel]],
    *,
    height: float | None = None,
    columns: int = 3,
    paper: str = "the paper's last",
    **options: Any,
) -> Figure:
    """Draw a grid of panels (`rows`) under a common legend. options: those of Figure.subplots, such as sharex."""
    figure, grid = panels(len(rows), max(map(len, rows)), height or 0.45 + ROW * len(rows), **options)
    pairs = [pair for axes, row in zip(grid, rows, strict=True) for pair in zip(axes, row, strict=True)]
    for axes, panel in pairs:
        draw_lines(axes, panel)
    if any(line.marked and line.side_by_side for _, panel in pairs for line in panel.lines):
        for axes, _ in pairs:  # room for shifted points; all panels, because they may share an axis
            axes.margins(x=ASIDE)
    for axes, panel in pairs:  # in a second loop, since the lines of all panels that share an axis determine its limits
        finish(axes, panel)
    legend(figure, keys([panel for row in rows for panel in row], paper), columns)
    return figure


def keys(shown: Sequence[Panel], paper: str = "the paper's last") -> list[Artist]:
    """Return the legend's entries: each labelled line or reference line once, and the paper's marks if any."""
    lines = [line for panel in shown for line in panel.lines if line.label]
    lines.sort(key=lambda line: line.secondary)
    entries = dict.fromkeys((line.label, line.style, line.width) for line in lines)
    rules = dict.fromkeys((rule.label, rule.dashes) for panel in shown for rule in panel.rules if rule.label)
    found: list[Artist] = [line_key(*entry) for entry in entries]
    found += [rule_key(label, dashes) for label, dashes in rules]
    return [*found, paper_key(paper)] if any(panel.paper for panel in shown) else found


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw one panel; if panels share an axis and have the paper's marks, use `curve_figure`."""
    draw_lines(axes, panel)
    finish(axes, panel)


def draw_lines(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title)
    axes.set_ylabel(panel.y_label)
    if panel.empty or not panel.lines:
        placeholder(axes, panel.empty or "no data")
        return
    for line in panel.lines:
        _draw_line(axes, line)
    for rule in panel.rules:
        dashes: Any = rule.dashes or (None, None)
        draw = axes.axvline if rule.upright else axes.axhline
        draw(rule.value, color=getattr(theme(), rule.colour), linewidth=WEIGHTS[rule.colour], dashes=dashes, zorder=1)


def finish(axes: Axes, panel: Panel) -> None:
    """Set a panel's limits and number formats after `draw_lines`; add the paper's marks and where arms branch."""
    if panel.empty or not panel.lines:
        return
    if panel.branches_at is not None:
        axes.axvline(panel.branches_at, color=theme().quiet, linewidth=0.7)
        _leave_out_long_trunk(axes, panel)
    largest = max(float(np.max(np.abs(edge))) for line in panel.lines for edge in (line.y, *(line.band or ())))
    if panel.y_axis == "change" and largest < LEAST:  # the arms are equal up to rounding errors
        axes.set_ylim(-LEAST, LEAST)
    if panel.y_limits != (None, None):
        axes.set_ylim(*panel.y_limits)
    _format(axes, panel)
    if panel.paper:
        _draw_paper_marks(axes, panel.paper)


def _draw_line(axes: Axes, line: Line) -> None:
    place: Transform = axes.transData
    shade, colour = line.style.shade, line.style.colour
    if line.marked and line.side_by_side:
        aside = 2.2 * (colour - 2 if isinstance(colour, int) else -3)
        axes.margins(x=ASIDE)
        place = place + ScaledTranslation(aside / 72, 0, axes.figure.dpi_scale_trans)
    options: dict[str, Any] = {"dashes": line.style.dashes or (None, None), "transform": place}
    options |= {} if line.width is None else {"linewidth": line.width}
    options |= {"markerfacecolor": "none"} if line.hollow else {}
    size = 8 if line.hollow else 2 if line.secondary and colour == "quiet" else None
    marker = line.style.marker if line.marked else ""
    axes.plot(line.x, line.y, color=shade, marker=marker, markersize=size, **options)
    if line.band is not None and line.marked:
        axes.vlines(line.x, *line.band, color=shade, linewidth=1.1, transform=place)
    elif line.band is not None:
        axes.fill_between(line.x, *line.band, color=shade, alpha=0.13, linewidth=0)
    if line.marked:  # matplotlib does not include points with a shifting transform in the limits of the axes
        edges = (line.y, *(line.band or ()))
        axes.update_datalim(np.column_stack([np.tile(line.x, len(edges)), np.concatenate(edges)]))
        axes.autoscale_view()


def _format(axes: Axes, panel: Panel) -> None:
    formats = {"tokens": EngFormatter(), "percent": percent(), "change": percent(signed=True)}
    for axis, kind in ((axes.xaxis, panel.x_axis), (axes.yaxis, panel.y_axis)):
        if kind in formats:
            axis.set_major_formatter(formats[kind])
    if panel.x_axis == "log":
        axes.set_xscale("log")
        axes.set_xticks(sorted({float(x) for line in panel.lines for x in line.x}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if panel.x_axis == "none":
        axes.set_xticks([])
        axes.margins(x=0.3, y=0.2)
    if panel.x_axis == "tokens":
        axes.locator_params(axis="x", nbins=panel.x_ticks)
    axes.set_xlabel(panel.x_label)


def _draw_paper_marks(axes: Axes, marks: Sequence[PaperMark]) -> None:
    low, high = axes.get_ylim()
    room = (FARTHEST - 1) * (high - low)
    within = [mark.value for mark in marks if high - room < mark.value < low + room]
    axes.set_ylim(min([low, *(1.05 * value for value in within)]), max([high, *(1.05 * value for value in within)]))
    options: dict[str, Any] = {"mfc": "none", "transform": axes.get_yaxis_transform(), "clip_on": False}
    for i, mark in enumerate(marks):
        marker, y = mark.style.marker, mark.value
        if mark.value not in within:
            up = mark.value > 0
            marker, y = (r"$\uparrow$", axes.get_ylim()[1]) if up else (r"$\downarrow$", axes.get_ylim()[0])
        axes.plot([1.03 + 0.045 * i], [y], marker=marker, mec=mark.style.shade, **options)


def _leave_out_long_trunk(axes: Axes, panel: Panel) -> None:
    """Hide the beginning of a trunk, so that at most three lengths of the branches stay."""
    assert panel.branches_at is not None
    last = max(float(line.x[-1]) for line in panel.lines)
    left = panel.branches_at - 3 * (last - panel.branches_at)
    if left > min(float(line.x[0]) for line in panel.lines) and panel.branches_at < last:
        edges = ((line.x, edge) for line in panel.lines for edge in (line.y, *(line.band or ())))
        seen = np.concatenate([values[x >= left] for x, values in edges])
        room = 0.06 * float(np.ptp(seen)) or LEAST
        axes.set(xlim=(left, last + ASIDE * (last - left)), ylim=(seen.min() - room, seen.max() + room))
