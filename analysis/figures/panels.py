"""Helpers for all figures: grids of panels, legends, number formats of axes, reasons in empty panels; bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from fewbits.analysis.figures.theme import SMALL, WIDTH, Style, theme

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
    """Return the legend's entry for the paper's numbers, which are hollow marks."""
    return Line2D([], [], linestyle="", marker="o", markerfacecolor="none", markeredgecolor=theme().quiet, label=label)


def legend(figure: Figure, keys: Sequence[Artist], columns: int = 3) -> None:
    """Add a legend with these entries above all panels, in at most `columns` columns; without entries, add nothing."""
    if keys:
        figure.legend(handles=list(keys), loc="outside upper left", ncols=min(columns, len(keys)), borderpad=0.1)


def placeholder(axes: Axes, reason: str) -> None:
    """Write into an empty panel the reason why it has no data."""
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


def counted(value: float, _: object = None) -> str:
    """Return a large number as short text, such as 300 k or 1.2 M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.4g}"


def bar_figure(
    groups: Sequence[str], panels_of: Mapping[str, Mapping[str, Sequence[float]]], styles: Mapping[str, Style]
) -> Figure:
    """Draw panels of grouped bars below each other.

    groups: the labels below the groups of bars. panels_of[title][series]: the heights of the series' bars in the panel
    with this title, one for each group; NaN draws no bar. styles[series]: the style of the series' bars.
    """
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
