"""Draw MoR's Figures 11 to 19: histograms of each tensor's mean relative error in E4M3, one count per mini-batch.

A row of a map is the histogram of one tensor. Its label has the paper's names: the layer, counted from 1, then
`linear_qkv`, `linear_proj`, `fc1` or `fc2`, then input, weight or gradient. The arm Channel quantizes the rows and the
columns of a tensor separately, so its maps have a row for each direction. The label "rows" means the vectors along
which fprop (inputs and weights) or dgrad (gradients) sums. The label "columns" means the vectors along which dgrad
(weights) or wgrad (inputs and gradients) sums. Counts are summed over seeds. The paper's term mini-batch stands for one
of our micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.places import Where, not_planned, sweep_places
from fewbits.analysis.figures.heat_map import HeatMap, HeatRow, heat_map_figure, histogram_row
from fewbits.analysis.figures.theme import SMALL, theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.mor.tensors import (
    EDGES,
    ONE,
    THRESHOLD,
    TITLES,
    TRUNK,
    TWO,
    counts,
    decisions,
)
from fewbits.sweeps.planning.store import State

LINE = f"threshold, {100 * THRESHOLD:g} %"
SHADES = "share of mini-batches in each row"
ERROR = "mean relative error in E4M3, %"
STEP = float(EDGES[1])  # the width of a bin
BINS = (*("" if i % 4 else f"{100 * edge:.2g}" for i, edge in enumerate(EDGES[:-2])), f">{100 * EDGES[-2]:.3g}")
draw_histograms = partial(heat_map_figure, key=SHADES, threshold=LINE)


@dataclass(frozen=True)
class Kind:
    """A tensor of a linear layer, or one direction of a tensor (its rows or its columns), with its operand slot."""

    label: str
    slot: str


INPUT, WEIGHT, GRADIENT = Kind("input", "fprop.x"), Kind("weight", "fprop.w"), Kind("grad", "dgrad.dy")
FORWARD_APART = (
    Kind("input rows", "fprop.x"),
    Kind("input columns", "wgrad.x"),
    Kind("weight rows", "fprop.w"),
    Kind("weight columns", "dgrad.w"),
)
GRADIENTS_APART = (Kind("grad rows", "dgrad.dy"), Kind("grad columns", "wgrad.dy"))


@dataclass(frozen=True)
class ErrorMap:
    """The description of a figure that shows errors of an arm's tensors in the last window of steps."""

    id: str
    arm: str
    kinds: tuple[Kind, ...]
    layers: Callable[[int], list[int]]  # returns the indices of the layers to show, given their number
    where: Where  # values of the sweep's axes


def ends(layers: int, each: int) -> list[int]:
    """Return the indices of the first `each` and the last `each` layers of a model with this number of layers."""
    return list(range(layers)) if layers <= 2 * each else [*range(each), *range(layers - each, layers)]


def spaced(layers: int, most: int) -> list[int]:
    """Return the indices of at most `most` evenly spaced layers of a model, including the first and the last.

    layers: the model's number of layers.
    """
    return sorted({round(i) for i in np.linspace(0, layers - 1, min(most, layers))})


MAPS = (
    ErrorMap("Figure 12", "block", (INPUT, WEIGHT), partial(ends, each=3), ONE),
    ErrorMap("Figure 13", "block", (GRADIENT,), partial(ends, each=3), ONE),
    ErrorMap("Figure 15", "block", (INPUT, WEIGHT), partial(ends, each=3), TWO),
    ErrorMap("Figure 16", "block", (GRADIENT,), partial(ends, each=6), TWO),
    ErrorMap("Figure 18", "channel", FORWARD_APART, lambda layers: list(range(min(layers, 2))), ONE),
    ErrorMap("Figure 19", "channel", GRADIENTS_APART, partial(ends, each=4), ONE),
)


def error_map(results: Results, of: ErrorMap) -> Picture:
    """Return the figure that `of` describes, or the reason why there are no data for it."""
    frame = _last(results, of.arm, of.where)
    if not isinstance(frame, pd.DataFrame):
        return frame
    rows = _rows(frame, of.layers(_layers(frame)), of.kinds)
    return FigureResult(lambda: draw_histograms([_map(rows)]), _ids(frame), (_note(frame, of.arm),))


for _one in MAPS:
    figure("mor", _one.id)(partial(error_map, of=_one))


@figure("mor", "Figure 11")
def annotated(results: Results) -> Picture:
    """Draw a heat map with the rows of layer 1 of Figures 12 and 13, and explain in it how to read such maps."""
    frame = _last(results, "block", ONE)
    if not isinstance(frame, pd.DataFrame):
        return frame
    rows = _rows(frame, [0], (INPUT, WEIGHT, GRADIENT))

    def draw() -> Figure:
        drawn = draw_histograms([_map(rows)], room=0.75)
        axes = drawn.axes[0]
        quiet, paper = theme().quiet, theme().background
        box = {"boxstyle": "square,pad=0.15", "facecolor": paper, "edgecolor": "none"}
        text: dict[str, Any] = {"fontsize": SMALL, "color": quiet, "va": "center", "bbox": box, "zorder": 5}
        arrow = {"arrowstyle": "->", "color": quiet, "linewidth": 0.8}
        right = 0.053 / STEP
        for words, at, y in (
            ("right of the line: BF16", (0.0455 / STEP, 1.0), 1.0),
            ("a row: one tensor,", (0.0255 / STEP, 4.0), 4.0),
            ("the last bin is open", (len(BINS), 8.0), 8.0),
        ):
            axes.annotate(words, at, (right, y), arrowprops=arrow, **text)
        axes.text(right, 5.0, "a count for each mini-batch", **text)
        return drawn

    return FigureResult(draw, _ids(frame), (_note(frame, "block"),))


@figure("mor", "Figure 14")
def over_steps(results: Results) -> Picture:
    """Draw histograms of three tensors of layer 1, with a row for each window of steps.

    The first rows are of the BF16 trunk, the others of the arm Block.
    """
    part = sweep_places(results, "partitions", ONE)
    if isinstance(part, NotPlanned):
        return part
    frame = decisions(part)
    frame = frame[frame["arm"].isin((TRUNK, "block")) & (frame["block"] == 0)]
    if frame.empty:
        return NoData("no window of layer 1 was recorded, so there are no errors to show")
    tensors = (("fc2 input", "down", INPUT), ("fc1 grad", "up", GRADIENT), ("linear_qkv grad", "qkv", GRADIENT))
    steps = sorted(frame["line_step"].unique())
    arms = frame.groupby("line_step")["arm"].first()

    def rows(part_name: str, kind: Kind) -> list[HeatRow]:
        of = frame[(frame["part"] == part_name) & (frame["slot"] == kind.slot)]
        groups = {step: "BF16 trunk" if arms[step] == TRUNK else "Block" for step in steps}
        return [histogram_row(f"{step}", counts(of[of["line_step"] == step]), groups[step]) for step in steps]

    def draw() -> Figure:
        maps = [replace(_map(rows(layer, kind), title), x_label="") for title, layer, kind in tensors]
        maps[1] = replace(maps[1], x_label=ERROR)
        drawn = draw_histograms(maps, beside=True)
        options: Any = {"fontsize": SMALL, "color": theme().quiet, "xycoords": "axes fraction", "ha": "right"}
        drawn.axes[0].annotate("step", (0, 1), (-8, 4), textcoords="offset points", **options)
        return drawn

    notes = ("Layer 1. The trunk quantizes nothing; its errors are the errors that E4M3 would have had.",)
    return FigureResult(draw, _ids(frame), notes + _seeds(frame))


@figure("mor", "Figure 17")
def beside_block(results: Results) -> Picture:
    """Draw error histograms of up to eight layers with tensor partition (left) and block partition (right).

    The tensors are the ones that the MoR paper names: FC2's input and the gradients of QKV and FC1.
    """
    frames = {arm: _last(results, arm, ONE) for arm in ("tensor", "block")}
    first = frames["tensor"]
    if not isinstance(first, pd.DataFrame):
        return first
    named = (("down", INPUT), ("qkv", GRADIENT), ("up", GRADIENT))
    found = {arm: frame for arm, frame in frames.items() if isinstance(frame, pd.DataFrame)}
    rows = {
        arm: [
            row
            for layer in spaced(_layers(first), 8)
            for part, kind in named
            for row in _rows(frame, [layer], (kind,), (part,))
        ]
        for arm, frame in found.items()
    }

    def draw() -> Figure:
        label = ERROR if len(rows) == 1 else "relative error, %"
        maps = [
            replace(_map(lines, f"{arm_table('mor').label(arm)} partition"), x_label=label)
            for arm, lines in rows.items()
        ]
        return draw_histograms(maps, beside=True)

    notes = (_note(first, "tensor"), "The right panel has the same tensors with block partition.")
    return FigureResult(draw, tuple(i for frame in found.values() for i in _ids(frame)), notes)


# -------------------------------------------------------------------------------- details


def _map(rows: Sequence[HeatRow], title: str = "") -> HeatMap:
    return HeatMap(tuple(rows), BINS, title, ERROR, open_bin=True, threshold=THRESHOLD / STEP)


def _last(results: Results, arm: str, where: Where) -> pd.DataFrame | NoData | NotPlanned:
    """Return the rows of `tensors.decisions` of an arm's finished trials, in their last window of steps.

    where: the values of the axes of the sweep `partitions` that select the trials. Return NotPlanned if the arm is not
    run at this scale, and NoData if none of its finished trials has recorded errors.
    """
    part = sweep_places(results, "partitions", where)
    if isinstance(part, NotPlanned):
        return part
    if not part.has(arm):
        return not_planned(results)
    frame = decisions(part)
    frame = last_windows(frame[(frame["arm"] == arm) & (frame["state"] == State.DONE)])
    label = arm_table("mor").label(arm)
    return NoData(f"no trial of {label} is done and has recorded errors") if frame.empty else frame


def _rows(
    frame: pd.DataFrame, layers: Iterable[int], kinds: Sequence[Kind], parts: Sequence[str] = ()
) -> list[HeatRow]:
    """Return a histogram for each combination of these layers, parts and kinds of tensors.

    frame: rows of the table `tensors.decisions`. layers: the layers' indices, counted from 0. parts: parts of a layer,
    such as qkv; if empty, all parts of TITLES that the layer has in `frame`.
    """
    found = []
    for layer in layers:
        of = frame[frame["block"] == layer]
        for part in parts or [p for p in TITLES if p in set(of["part"])]:
            for kind in kinds:
                rows = of[(of["part"] == part) & (of["slot"] == kind.slot)]
                found.append(histogram_row(f"{TITLES[part]} {kind.label}", counts(rows), f"layer {layer + 1}"))
    return found


def _layers(frame: pd.DataFrame) -> int:
    return 1 + int(frame["block"].max())


def _ids(frame: pd.DataFrame) -> tuple[str, ...]:
    return tuple(dict.fromkeys(frame["id"]))


def _seeds(frame: pd.DataFrame) -> tuple[str, ...]:
    seeds = sorted(frame["seed"].unique())
    return (f"Counts are summed over {len(seeds)} seeds.",) if len(seeds) > 1 else ("One seed.",)


def _note(frame: pd.DataFrame, arm: str) -> str:
    """Return a note with the arm, the number of mini-batches that a heat map's row counts, and the number of seeds.

    frame: the result of `_last` for this arm.
    """
    batches = int(frame.groupby(["layer", "slot"])["batches"].sum().max())
    (seeds,) = _seeds(frame)
    return f"{arm_table('mor').label(arm)}, the last window: {batches} mini-batches per row. {seeds}"
