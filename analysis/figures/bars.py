"""Draw estimates with their intervals, one in each row, or groups of upright bars.

The first estimate is in the top row. A number that the study's paper reports is a hollow mark in the row of our number.
If a number is beyond the range of the axis, an arrow (ours) or a triangle (the paper's) at the edge stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fewbits.analysis.engine.statistics.estimates import Interval
from fewbits.analysis.figures.panels import legend, panels, paper_key, percent, rows_of_labels, rule_key
from fewbits.analysis.figures.theme import BASELINE, SMALL, Style, theme

DOTTED = (2, 2)


@dataclass(frozen=True)
class Estimate:
    """A row of a figure: our number with its interval, and the number that the study's paper reports for it."""

    label: str
    mean: float | None  # ours; None if it is missing, and then `text` gives the reason
    interval: Interval | None = None
    paper: float | None = None
    text: str = ""  # shown to the right of the panel
    group: str = ""  # a line separates rows of different groups
    style: Style = BASELINE

    @property
    def ends(self) -> tuple[float, ...]:
        return () if self.interval is None else (self.interval.low, self.interval.high)


def effects_figure(
    rows: Sequence[Estimate], margins: Sequence[float], noise: Interval | None, label: str, reach: float
) -> Figure:
    """Draw relative changes with their intervals, one in each row, on an axis from -reach to reach.

    Vertical lines mark zero and ± each margin; a band marks the interval `noise` of the A/A comparison. All numbers
    are fractions, which the axis shows in percent. label: the text below the axis.
    """
    figure, ((axes,),) = panels(1, 1, 1.15 + 0.21 * len(rows))
    axes.set(xlim=(-reach, reach), ylim=(len(rows) - 0.4, -0.6))
    for value in (*margins, *(-margin for margin in margins)):
        axes.axvline(value, color=theme().quiet, linewidth=0.8, dashes=DOTTED, zorder=1)
    axes.axvline(0, color=theme().text, linewidth=0.9, zorder=1)
    if noise is not None:
        axes.axvspan(noise.low, noise.high, color=theme().quiet, alpha=0.25, linewidth=0)
    for y, row in enumerate(rows):
        axes.text(1.02, y, row.text, transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL)
        draw_estimate(axes, y, row, reach)
        if y and row.group != rows[y - 1].group:
            axes.axhline(y - 0.5, color=theme().grid, linewidth=0.8)
    rows_of_labels(axes, [row.label for row in rows])
    axes.xaxis.set_major_formatter(percent(signed=True))
    axes.set_xlabel(label)
    legend(figure, _keys(rows, margins, noise), columns=2)
    return figure


def draw_estimate(axes: Axes, y: float, row: Estimate, reach: float | None = None) -> None:
    """Draw one row at height y: our mark is filled, the paper's is hollow.

    If the absolute value of a number exceeds `reach`, a mark at the edge points outwards instead: an arrow for our
    number, a triangle for the paper's. If `reach` is None, each number has its usual mark, however large it is.
    """
    far = np.inf if reach is None else reach
    if row.paper is not None:
        beyond = abs(row.paper) > far
        marker = ("<" if row.paper < 0 else ">") if beyond else row.style.marker
        edge = theme().quiet if row.mean is not None or reach is not None else row.style.shade
        axes.plot([np.clip(row.paper, -0.97 * far, 0.97 * far)], [y], marker, mfc="none", mec=edge, ms=6, zorder=2)
    if row.mean is None:
        return
    if abs(row.mean) > far:
        arrow = {"arrowstyle": "-|>", "color": theme().line, "linewidth": 1.2}
        axes.annotate("", (np.sign(row.mean) * far, y), (np.sign(row.mean) * 0.9 * far, y), arrowprops=arrow)
        return
    if row.interval is not None:
        low, high = max(row.interval.low, -far), min(row.interval.high, far)
        axes.plot([low, high], [y, y], color=row.style.shade, linewidth=1.4)
    axes.plot([row.mean], [y], row.style.marker, color=row.style.shade, ms=4.5, zorder=3)


def draw_estimates(axes: Axes, title: str, rows: Sequence[Estimate]) -> None:
    """Draw a panel of estimates, one in each row, on an axis that shows fractions as percent."""
    axes.set_title(title)
    for y, row in enumerate(rows):
        draw_estimate(axes, y, row)
    rows_of_labels(axes, [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=True, axis="x")
    axes.margins(x=0.15)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(percent())


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


def _keys(rows: Sequence[Estimate], margins: Sequence[float], noise: Interval | None) -> list[Artist]:
    ours = "mean, 90 % interval" if any(row.interval for row in rows) else "ours, one seed"
    found: list[Artist] = [Line2D([], [], color=theme().text, marker="o", label=ours)]
    found += [paper_key()] if any(row.paper is not None for row in rows) else []
    if noise is not None:
        found.append(Patch(facecolor=theme().quiet, alpha=0.25, label="A/A: BF16 again"))
    values = " and ".join(f"{100 * margin:g}" for margin in margins)
    return [*found, rule_key(f"margins, ± {values} %", DOTTED)] if margins else found
