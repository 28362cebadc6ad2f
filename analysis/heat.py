"""Heat maps of histograms: a row for each, its counts as shares of the row's sum, and a line where a threshold is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.transforms import blended_transform_factory

from fewbits.analysis.plots import SMALL, Array, theme

ROW = 0.155  # inches that a row is high


@dataclass(frozen=True)
class HeatRow:
    """Counts of a histogram whose last bin is open. `group`: what rows beside each other have in common."""

    label: str
    counts: Array
    group: str = ""


def heat_map(axes: Axes, rows: Sequence[HeatRow], edges: Array, threshold: float, *, labels: bool = True) -> None:
    """A row of cells for each histogram, each row's shares of its own sum; and a line where the threshold is."""
    shade = shades()
    step = float(edges[1] - edges[0])
    bins = len(edges) - 1
    gap = 0.6 * step  # sets the open bin apart
    lefts = np.append(edges[: bins - 1], edges[bins - 1] + gap)
    cells, colours = [], []
    for y, row in enumerate(rows):
        shares = row.counts / max(row.counts.sum(), 1)
        for left, share in zip(lefts, shares, strict=True):
            if share > 0:
                cells.append(Rectangle((left, y - 0.46), step, 0.92))
                colours.append(shade(share))
    axes.add_collection(PatchCollection(cells, facecolors=colours, linewidths=0))
    right = float(lefts[-1]) + step
    axes.set(xlim=(0, right), ylim=(len(rows) - 0.4, -0.6))
    axes.axvline(threshold, color=theme().line, linewidth=1.4, zorder=3)
    shown = np.arange(0, edges[bins - 1] - step, 4 * step)
    axes.set_xticks([*shown, right - step / 2], [*(f"{100 * x:.2g}" for x in shown), f">{100 * edges[bins - 1]:.3g}"])
    axes.grid(False)
    for y in range(len(rows) + 1):
        axes.axhline(y - 0.5, color=theme().grid, linewidth=0.6, zorder=0)
    axes.axvline(edges[bins - 1] + gap / 2, color=theme().quiet, linewidth=0.8, dashes=(1, 2), zorder=1)
    axes.set_yticks(range(len(rows)), [row.label for row in rows] if labels else [])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _mark_groups(axes, rows, labels)


def _mark_groups(axes: Axes, rows: Sequence[HeatRow], labels: bool) -> None:
    """A line between groups, and each group's name beside its rows: upright, or its last word where rows are few."""
    starts = [i for i, row in enumerate(rows) if i == 0 or row.group != rows[i - 1].group]
    longest = max(len(row.label) for row in rows)
    beside = blended_transform_factory(axes.transAxes, axes.transData)
    ends = [*starts[1:], len(rows)]
    letter = SMALL * 0.6
    upright = all(len(rows[a].group) * letter < (b - a) * ROW * 72 for a, b in zip(starts, ends, strict=True))
    for start, end in zip(starts, ends, strict=True):
        if start:
            axes.axhline(start - 0.5, color=theme().quiet, linewidth=0.8, zorder=1)
        if labels and rows[start].group:
            axes.annotate(
                rows[start].group if upright else rows[start].group.split()[-1],
                (0, (start + end - 1) / 2),
                xycoords=beside,
                xytext=(-(longest * letter + 14), 0),
                textcoords="offset points",
                rotation=90 if upright else 0,
                rotation_mode="anchor",
                ha="center" if upright else "right",
                va="baseline" if upright else "center",
                fontsize=SMALL,
                color=theme().quiet,
            )


def shades() -> LinearSegmentedColormap:
    """From the background to the theme's fullest colour; a little is seen already."""
    faint, middle = ("#dbe9f6", "#4292c6") if theme().name == "light" else ("#17324a", "#3c86c0")
    return LinearSegmentedColormap.from_list("shares", [faint, middle, theme().full])


def ink(fill: tuple[float, float, float, float]) -> str:
    """The colour of letters on that one."""
    return "#1b1f24" if np.dot(fill[:3], (0.3, 0.59, 0.11)) > 0.5 else "#ffffff"


def shades_key(figure: Figure, axes: Sequence[Axes], label: str, threshold: str) -> None:
    """Below heat maps: what their shades and their line mean."""
    bar = figure.colorbar(
        ScalarMappable(cmap=shades()), ax=list(axes), orientation="horizontal", fraction=0.02, aspect=30, pad=0.01
    )
    bar.set_label(label)
    bar.set_ticks([0, 0.5, 1], labels=["0", "½", "1"])
    bar.outline.set_visible(False)
    figure.legend(
        handles=[Line2D([], [], color=theme().line, linewidth=1.4, label=threshold)],
        loc="outside upper right",
        borderpad=0.1,
    )
