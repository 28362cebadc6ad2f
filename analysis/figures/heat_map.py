"""Draw heat maps: tables of shaded cells. The cells of a row show single numbers or the bins of a histogram.

`probes_figure` shows how much quantizing an operand, a GEMM or a block of layers changes the gradient and the loss: two
heat maps, of the gradient's error and of the loss's increase, with a row for each operand, GEMM and block. Each arm has
two columns: only the operand, GEMM or block of the row is quantized (`alone`), or everything except it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import blended_transform_factory

from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.evaluations import whole_model_rows
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import PROBES, arm_table, not_planned, sweep_places
from fewbits.analysis.figures.panels import legend, line_key, panels, rows_of_labels
from fewbits.analysis.figures.theme import SMALL, Array, Style, ink, shades, theme
from fewbits.analysis.report.items import FigureResult, Picture

ROW = 0.155  # the height of a histogram's row in inches
NUMBERED_ROW = 0.2  # the height of a row of cells with numbers in inches
MARGIN = 0.02  # the gap at each side of a cell, as a fraction of its width
WRAPPED = 10  # the most characters in a line of a column's label above the map
APART = 0.6  # the gap before a histogram's last bin, which has no upper limit, in widths of a cell


@dataclass(frozen=True)
class HeatRow:
    """A row of a heat map: cells of NaN and 0 are empty; cells of negative numbers have a text, but no shade."""

    label: str
    values: Array  # one for each column
    group: str = ""  # the name beside neighbouring rows of the same group


@dataclass(frozen=True)
class HeatMap:
    """One heat map, which fills one panel: its rows, the labels of its columns, and how they are drawn."""

    rows: tuple[HeatRow, ...]
    columns: tuple[str, ...]  # labels; a column with an empty label has no tick
    title: str = ""
    x_label: str = ""
    most: float = 1.0  # the value with the darkest shade; other values are shaded as shares of it
    spell: Callable[[float], str] | None = None  # returns the text in the cell of a value; None: no texts
    open_bin: bool = False  # whether a gap separates the last column (a bin without upper limit) from the others
    threshold: float | None = None  # the position of an upright line: 0 is the left edge of the first column
    columns_above: bool = False  # whether the labels of columns are above the map


def histogram_row(label: str, counts: Array, group: str = "") -> HeatRow:
    return HeatRow(label, counts / max(counts.sum(), 1), group)


def heat_map_figure(
    maps: Sequence[HeatMap], *, key: str = "", threshold: str = "", beside: bool = False, room: float = 0.0
) -> Figure:
    """Draw heat maps. key, threshold: legends of the colour bar and of the upright line; room: additional inches."""
    numbered = maps[0].spell is not None
    sizes = [len(one.rows) for one in maps]
    each, extra = (NUMBERED_ROW, 0.45) if numbered else (ROW, 0.15 if beside else 0.0)
    height = room + (0.3 if numbered else 1.3) + each * (max(sizes) if beside else sum(sizes))
    height += extra * (1 if beside else len(maps))
    shape = (1, len(maps)) if beside else (len(maps), 1)
    options: dict[str, Any] = {} if beside else {"height_ratios": [2 + size for size in sizes]}
    figure, grid = panels(*shape, height, **options)
    all_axes = [axes for row in grid for axes in row]
    for i, (axes, one) in enumerate(zip(all_axes, maps, strict=True)):
        draw_heat_map(axes, one, labels=not (beside and i))
    if key:
        # A colour bar of few steps is drawn as vectors and not as an image. theme.in_both_themes cannot merge images,
        # because they would differ between the themes in more than colours.
        place: dict[str, Any] = {"orientation": "horizontal", "fraction": 0.02, "aspect": 30, "pad": 0.01}
        steps = np.linspace(0, 1, 33)
        bar = figure.colorbar(ScalarMappable(cmap=shades()), ax=all_axes, boundaries=steps, **place)
        assert bar.solids is not None
        bar.solids.set_edgecolor("face")  # no gaps between the steps
        bar.set_label(key)
        bar.set_ticks([0, 0.5, 1], labels=["0", "½", "1"])
        bar.outline.set_visible(False)
    if threshold:
        legend(figure, [line_key(threshold, Style("line", marker=""))])
    return figure


def draw_heat_map(axes: Axes, of: HeatMap, *, labels: bool = True) -> None:
    """Draw one heat map. labels: whether to write the labels of rows and groups."""
    shade = shades()
    cells, fills = [], []
    lefts = np.arange(len(of.columns)) + np.append(np.zeros(len(of.columns) - 1), APART * of.open_bin)
    margin = MARGIN if of.spell else 0.0
    for y, row in enumerate(of.rows):
        for left, value in zip(lefts, row.values, strict=True):
            colour = theme().text
            if value > 0:
                fill = shade(value / of.most)
                cells.append(Rectangle((left + margin, y - 0.46), 1 - 2 * margin, 0.92))
                fills.append(fill)
                colour = ink(fill)
            if of.spell and abs(value) > 0:
                text: Any = {"ha": "center", "va": "center_baseline", "fontsize": SMALL, "color": colour}
                axes.text(left + 0.5, y, of.spell(value), **text)
    axes.add_collection(PatchCollection(cells, facecolors=fills, linewidths=0))
    axes.set(xlim=(0, lefts[-1] + 1), ylim=(len(of.rows) - 0.4, -0.6), title=of.title, xlabel=of.x_label)
    rows_of_labels(axes, [row.label for row in of.rows] if labels else [])
    for y in range(len(of.rows) + 1):
        axes.axhline(y - 0.5, color=theme().grid, linewidth=0.6, zorder=0)
    ticks = {left + 0.5 * bool(of.spell or (of.open_bin and left == lefts[-1])): i for i, left in enumerate(lefts)}
    shown = {place: of.columns[i] for place, i in ticks.items() if of.columns[i]}
    if of.columns_above:
        shown = {place: textwrap.fill(label, WRAPPED, break_long_words=False) for place, label in shown.items()}
    axes.set_xticks(list(shown), list(shown.values()))
    if of.open_bin:
        axes.axvline(lefts[-1] - APART / 2, color=theme().quiet, linewidth=0.8, dashes=(1, 2), zorder=1)
    if of.threshold is not None:
        axes.axvline(of.threshold, color=theme().line, linewidth=1.4, zorder=3)
    if of.spell:
        axes.tick_params(length=0, labelbottom=not of.columns_above, labeltop=of.columns_above)
        axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(False)
    _mark_groups(axes, of.rows, labels)


def _mark_groups(axes: Axes, rows: Sequence[HeatRow], labels: bool) -> None:
    """Draw lines between groups of rows, and the groups' names; if these do not fit upright, only their last words."""
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


# -------------------------------------------------------------------------------- probes

ALL = "all"
# Labels by the first word of a variant's name in the probes' tables; the other words name the operand, GEMM or block.
KINDS = {"only": "alone", "without": "all but it"}
MEASURES = {  # title of the map: the measure and the factor by which it is shown
    "Error of the gradient, %": ("error", 100.0),
    "Increase of the loss, millinats per token": ("increase", 1000.0),
}


@dataclass(frozen=True)
class ProbesFigure:
    id: str
    arms: tuple[str, ...] = ()
    where: dict[str, str] = field(default_factory=dict)  # selected values of the sweep's axes


def probes_figure(results: Results, study: str, of: ProbesFigure) -> Picture:
    """Return the figure of probes that `of` declares, with a row for each operand, GEMM and block of layers."""
    part = sweep_places(results, PROBES, of.where)
    if not isinstance(part, Results) or not any(part.has(arm, of.where) for arm in of.arms):
        return not_planned(results)
    rows = whole_model_rows(part)
    rows = rows[rows["arm"].isin(of.arms)] if len(rows) else rows
    if rows.empty:
        return NoData("no probe is finished")
    arms, label = [arm for arm in of.arms if arm in set(rows["arm"])], arm_table(study).label
    columns = [(arm, kind) for arm in arms for kind in KINDS]
    targets = dict.fromkeys(name.partition(" ")[2] for name in rows["variant"] if name != ALL)
    means = rows.groupby(["arm", "variant"])[[name for name, _ in MEASURES.values()]].mean()

    def heat_map(title: str) -> HeatMap:
        measure, factor = MEASURES[title]
        found = (factor * means[measure]).to_dict()
        lines = [HeatRow("everything", np.array([found[arm, ALL] if k == "only" else math.nan for arm, k in columns]))]
        for target in targets:
            values = np.array([found.get((arm, f"{kind} {target}"), math.nan) for arm, kind in columns])
            lines.append(HeatRow(target, values))
        most = max(0.0, float(np.nanmax([row.values for row in lines]))) or 1.0
        names = tuple(KINDS[k] if len(arms) == 1 else f"{label(arm)}: {KINDS[k]}" for arm, k in columns)
        title = title if len(arms) > 1 else f"{label(arms[0])}: {title[0].lower()}{title[1:]}"
        return HeatMap(tuple(lines), names, title, most=most, spell=_spell, columns_above=True)

    def draw() -> Figure:
        return heat_map_figure([heat_map(title) for title in MEASURES], room=0.0 if len(arms) == 1 else 0.5)

    notes = (
        "Means over batches and seeds. `Alone`: only this operand, GEMM or block is quantized as the recipe says; `all "
        "but it`: everything except it is quantized. An operand that two GEMMs share is shown under the first of them. "
        "Increases below 0 are not shaded.",
    )
    return FigureResult(draw, tuple(dict.fromkeys(rows["id"])), notes)


def _spell(value: float) -> str:
    return (f"{value:.1f}" if abs(value) >= 1 else f"{value:.2f}").replace("-", "−")
