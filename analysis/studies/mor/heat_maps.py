"""Draw MoR's Figures 11 to 19: histograms of each tensor's mean relative error in E4M3, one count per mini-batch.

A row of a map is the histogram of one tensor. Its label has the paper's names: the layer, counted from 1, then
`linear_qkv`, `linear_proj`, `fc1` or `fc2`, then input, weight or gradient. The arm Channel quantizes the rows and the
columns of a tensor separately, so its maps have a row for each: `rows` are the vectors along which fprop (inputs and
weights) or dgrad (gradients) sums, `columns` those along which dgrad (weights) or wgrad (inputs and gradients) sums.
Counts are summed over seeds; the observer has summed them over ranks. A mini-batch is one micro-batch of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.places import Where, arm_table, not_planned, sweep_places
from fewbits.analysis.figures.heat_map import HeatMap, HeatRow, heat_map_figure, histogram_row
from fewbits.analysis.figures.theme import SMALL, theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.mor import tensors
from fewbits.analysis.studies.mor.tensors import DY, EDGES, FC1, FC2, ONE, QKV, THRESHOLD, TITLES, TRUNK, TWO, W, X
from fewbits.sweeps.planning.store import State

ERROR = "mean relative error in E4M3, %"
STEP = float(EDGES[1])  # the width of a bin
BINS = (*("" if i % 4 else f"{100 * edge:.2g}" for i, edge in enumerate(EDGES[:-2])), f">{100 * EDGES[-2]:.3g}")
draw_histograms = partial(
    heat_map_figure, key="share of mini-batches in each row", threshold=f"threshold, {100 * THRESHOLD:g} %"
)

Kinds = dict[str, str]  # label of a tensor, or of one direction of it → operand slot
Layers = Callable[[int], list[int]]  # returns the indices of the layers to show, given their number
FORWARD, GRADIENT = {"input": X, "weight": W}, {"grad": DY}
FORWARD_APART = {
    "input rows": X,
    "input columns": tensors.X_COLUMNS,
    "weight rows": W,
    "weight columns": tensors.W_COLUMNS,
}
GRADIENTS_APART = {"grad rows": DY, "grad columns": tensors.DY_COLUMNS}


def ends(layers: int, each: int) -> list[int]:
    """Return the indices of the first `each` and the last `each` layers of a model with this number of layers."""
    return list(range(layers)) if layers <= 2 * each else [*range(each), *range(layers - each, layers)]


def spaced(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices of `count` things, including the first and the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(most, count))})


def error_map(results: Results, arm: str, where: Where, kinds: Kinds, layers: Layers) -> Picture:
    """Return the figure of errors of an arm's tensors in the last window of steps, or the reason why there is none."""
    frame = _last(results, arm, where)
    if not isinstance(frame, pd.DataFrame):
        return frame
    rows = _rows(frame, layers(_layers(frame)), kinds)
    return FigureResult(lambda: draw_histograms([_map(rows)]), _ids(frame), (_note(frame, arm),))


_MAPS: tuple[tuple[str, str, Where, Kinds, Layers], ...] = (
    ("Figure 12", "block", ONE, FORWARD, partial(ends, each=3)),
    ("Figure 13", "block", ONE, GRADIENT, partial(ends, each=3)),
    ("Figure 15", "block", TWO, FORWARD, partial(ends, each=3)),
    ("Figure 16", "block", TWO, GRADIENT, partial(ends, each=6)),
    ("Figure 18", "channel", ONE, FORWARD_APART, lambda layers: list(range(min(layers, 2)))),
    ("Figure 19", "channel", ONE, GRADIENTS_APART, partial(ends, each=4)),
)
for _id, _arm, _where, _kinds, _of in _MAPS:
    figure("mor", _id)(partial(error_map, arm=_arm, where=_where, kinds=_kinds, layers=_of))


@figure("mor", "Figure 11")
def annotated(results: Results) -> Picture:
    """Draw a heat map with the rows of layer 1 of Figures 12 and 13, and explain in it how to read such maps."""
    frame = _last(results, "block", ONE)
    if not isinstance(frame, pd.DataFrame):
        return frame
    rows = _rows(frame, [0], FORWARD | GRADIENT)

    def draw() -> Figure:
        drawn = draw_histograms([_map(rows)], room=0.75)
        box = {"boxstyle": "square,pad=0.15", "facecolor": theme().background, "edgecolor": "none"}
        text: dict[str, Any] = {"fontsize": SMALL, "color": theme().quiet, "va": "center", "bbox": box, "zorder": 5}
        arrow, right = {"arrowstyle": "->", "color": theme().quiet, "linewidth": 0.8}, 0.053 / STEP
        for words, at, y in (
            ("right of the line: BF16", 0.0455 / STEP, 1.0),
            ("a row: one tensor,", 0.0255 / STEP, 4.0),
            ("the last bin is open", len(BINS), 8.0),
        ):
            drawn.axes[0].annotate(words, (at, y), (right, y), arrowprops=arrow, **text)
        drawn.axes[0].text(right, 5.0, "a count for each mini-batch", **text)
        return drawn

    return FigureResult(draw, _ids(frame), (_note(frame, "block"),))


@figure("mor", "Figure 14")
def over_steps(results: Results) -> Picture:
    """Draw histograms of three tensors of layer 1, with a row for each window of the BF16 trunk and of Block."""
    part = sweep_places(results, "partitions", ONE)
    if isinstance(part, NotPlanned):
        return part
    frame = tensors.decisions(part)
    frame = frame[frame["arm"].isin((TRUNK, "block")) & (frame["block"] == 0)]
    if frame.empty:
        return NoData("no window of layer 1 was recorded, so there are no errors to show")
    arms = frame.groupby("line_step")["arm"].first()
    steps = [arms.index[i] for i in spaced(len(arms), 40)]

    def rows(part_name: str, slot: str) -> list[HeatRow]:
        of = frame[(frame["part"] == part_name) & (frame["slot"] == slot)]
        groups = {step: "BF16 trunk" if arms[step] == TRUNK else "Block" for step in steps}
        return [histogram_row(f"{step:,}", tensors.counts(of[of["line_step"] == step]), groups[step]) for step in steps]

    def draw() -> Figure:
        shown = (("fc2 input", FC2, X, ""), ("fc1 grad", FC1, DY, ERROR), ("linear_qkv grad", QKV, DY, ""))
        maps = [replace(_map(rows(layer, slot), title), x_label=label) for title, layer, slot, label in shown]
        drawn = draw_histograms(maps, beside=True)
        options: Any = {"fontsize": SMALL, "color": theme().quiet, "xycoords": "axes fraction", "ha": "right"}
        drawn.axes[0].annotate("step", (0, 1), (-8, 4), textcoords="offset points", **options)
        return drawn

    notes = ("Layer 1. The trunk quantizes nothing; its errors are the errors that E4M3 would have had.",)
    return FigureResult(draw, _ids(frame), (*notes, _seeds(frame)))


@figure("mor", "Figure 17")
def beside_block(results: Results) -> Picture:
    """Draw error histograms of up to eight layers with tensor partition (left) and block partition (right)."""
    first, second = (_last(results, arm, ONE) for arm in ("tensor", "block"))
    if not isinstance(first, pd.DataFrame):
        return first
    found = {"tensor": first} | ({"block": second} if isinstance(second, pd.DataFrame) else {})
    named: tuple[tuple[str, Kinds], ...] = ((FC2, {"input": X}), (QKV, GRADIENT), (FC1, GRADIENT))
    layers = spaced(_layers(first), 8)
    rows = {
        arm: [row for layer in layers for part, kind in named for row in _rows(frame, [layer], kind, (part,))]
        for arm, frame in found.items()
    }

    def draw() -> Figure:
        label, title = ERROR if len(rows) == 1 else "relative error, %", arm_table("mor").label
        maps = [replace(_map(lines, f"{title(arm)} partition"), x_label=label) for arm, lines in rows.items()]
        return draw_histograms(maps, beside=True)

    notes = (_note(first, "tensor"), "The right panel has the same tensors with block partition.")
    return FigureResult(draw, tuple(i for frame in found.values() for i in _ids(frame)), notes)


# -------------------------------------------------------------------------------- details


def _map(rows: Sequence[HeatRow], title: str = "") -> HeatMap:
    return HeatMap(tuple(rows), BINS, title, ERROR, open_bin=True, threshold=THRESHOLD / STEP)


def _last(results: Results, arm: str, where: Where) -> pd.DataFrame | NoData | NotPlanned:
    """Return the decisions of an arm's finished trials in their last window of steps. where: axes of `partitions`."""
    part = sweep_places(results, "partitions", where)
    if isinstance(part, NotPlanned) or not part.has(arm):
        return not_planned(results)
    frame = tensors.decisions(part)
    frame = last_windows(frame[(frame["arm"] == arm) & (frame["state"] == State.DONE)])
    label = arm_table("mor").label(arm)
    return NoData(f"no trial of {label} is done and has recorded errors") if frame.empty else frame


def _rows(frame: pd.DataFrame, layers: Iterable[int], kinds: Kinds, parts: Sequence[str] = ()) -> list[HeatRow]:
    """Return a histogram for each layer (from 0), part (if empty, all of TITLES in `frame`) and kind of tensor."""
    found = []
    for layer in layers:
        of = frame[frame["block"] == layer]
        for part in parts or [p for p in TITLES if p in set(of["part"])]:
            for label, slot in kinds.items():
                counts = tensors.counts(of[(of["part"] == part) & (of["slot"] == slot)])
                found.append(histogram_row(f"{TITLES[part]} {label}", counts, f"layer {layer + 1}"))
    return found


def _layers(frame: pd.DataFrame) -> int:
    return 1 + int(frame["block"].max())


def _ids(frame: pd.DataFrame) -> tuple[str, ...]:
    return tuple(dict.fromkeys(frame["id"]))


def _seeds(frame: pd.DataFrame) -> str:
    seeds = frame["seed"].nunique()
    return f"Counts are summed over {seeds} seeds." if seeds > 1 else "One seed."


def _note(frame: pd.DataFrame, arm: str) -> str:
    """Return a note with the arm, the number of mini-batches that a heat map's row counts, and the number of seeds."""
    batches = int(frame.groupby(["layer", "slot"])["batches"].sum().max())
    label = arm_table("mor").label(arm)
    return f"{label}, the last window: {batches:,} mini-batches (micro-batches of all ranks) per row. {_seeds(frame)}"
