"""Figures 11 to 19: histograms of the mean relative error that E4M3 makes of each tensor, a count for each mini-batch.

Rows are named as in the paper: layers from 1, `linear_qkv`, `linear_proj`, `fc1`, `fc2`, and of each its input, weight
and gradient. Where rows and columns are quantized apart, a tensor has two: its rows are the vectors that the forward
product (of a gradient: that for the input) sums over, its columns those of the product that comes later.
Counts are summed over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fewbits.analysis import heat, plots
from fewbits.analysis.arms import TRUNK
from fewbits.analysis.engine.data import NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.heat import HeatRow
from fewbits.analysis.mor.decisions import EDGES, at_end, counts, decisions
from fewbits.analysis.mor.looks import ARMS, THRESHOLD, chosen
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture
from fewbits.sweeps.running.store import State

PARTS = {"qkv": "linear_qkv", "out": "linear_proj", "up": "fc1", "down": "fc2", "in": "in_proj"}
LINE = f"threshold, {100 * THRESHOLD:g} %"
SHADES = "share of mini-batches in each row"
ERROR = "mean relative error in E4M3, %"


@dataclass(frozen=True)
class Kind:
    """A tensor of a linear layer, or one direction of it."""

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


@figure("mor", "Figure 11")
def figure_11(results: Results) -> Picture:
    return annotated(results)


@figure("mor", "Figure 12")
def figure_12(results: Results) -> Picture:
    return heat_map(results, "block", (INPUT, WEIGHT), lambda n: ends(n, 3))


@figure("mor", "Figure 13")
def figure_13(results: Results) -> Picture:
    return heat_map(results, "block", (GRADIENT,), lambda n: ends(n, 3))


@figure("mor", "Figure 14")
def figure_14(results: Results) -> Picture:
    return over_steps(results)


@figure("mor", "Figure 15")
def figure_15(results: Results) -> Picture:
    return heat_map(results, "block", (INPUT, WEIGHT), lambda n: ends(n, 3), configuration="2")


@figure("mor", "Figure 16")
def figure_16(results: Results) -> Picture:
    return heat_map(results, "block", (GRADIENT,), lambda n: ends(n, 6), configuration="2")


@figure("mor", "Figure 17")
def figure_17(results: Results) -> Picture:
    return beside_block(results)


@figure("mor", "Figure 18")
def figure_18(results: Results) -> Picture:
    return heat_map(results, "channel", FORWARD_APART, lambda n: list(range(min(n, 2))))


@figure("mor", "Figure 19")
def figure_19(results: Results) -> Picture:
    return heat_map(results, "channel", GRADIENTS_APART, lambda n: ends(n, 4))


# -------------------------------------------------------------------------------- the figures


def heat_map(
    results: Results,
    arm: str,
    kinds: Sequence[Kind],
    layers: Callable[[int], list[int]],
    *,
    configuration: str = "1",
) -> Picture:
    """The arm's last window: every kind of tensor of every linear layer of some transformer layers."""
    frame = _last(results, arm, configuration)
    if not isinstance(frame, pd.DataFrame):
        return frame
    rows = list(_rows(frame, layers(_layers(frame)), kinds))

    def draw() -> Figure:
        picture, ((axes,),) = plots.panels(1, 1, _height(len(rows)))
        heat.heat_map(axes, rows, EDGES, THRESHOLD)
        axes.set_xlabel(ERROR)
        heat.shades_key(picture, [axes], SHADES, LINE)
        return picture

    return FigureResult(draw, _ids(frame), (_when(frame, arm),))


def annotated(results: Results) -> Picture:
    """Figure 12's first rows, with what is to be seen in them."""
    frame = _last(results, "block", "1")
    if not isinstance(frame, pd.DataFrame):
        return frame
    rows = list(_rows(frame, [0], (INPUT, WEIGHT, GRADIENT)))

    def draw() -> Figure:
        picture, ((axes,),) = plots.panels(1, 1, _height(len(rows)) + 0.75)
        heat.heat_map(axes, rows, EDGES, THRESHOLD)
        axes.set_xlabel(ERROR)
        heat.shades_key(picture, [axes], SHADES, LINE)
        said = (
            ("right of the line: BF16", (0.0455, 1.0), (0.053, 1.0)),
            ("a row: one tensor,", (0.0255, 4.0), (0.053, 4.0)),
            ("a count for each mini-batch", None, (0.053, 5.0)),
            ("the last bin is open", (float(EDGES[-2]) + 0.005, 8.0), (0.053, 8.0)),
        )
        arrow = {"arrowstyle": "->", "color": plots.theme().quiet, "linewidth": 0.8}
        box = {"boxstyle": "square,pad=0.15", "facecolor": plots.theme().background, "edgecolor": "none"}
        for words, at, where in said:
            look: dict[str, Any] = {
                "fontsize": plots.SMALL,
                "color": plots.theme().quiet,
                "va": "center",
                "bbox": box,
                "zorder": 5,
            }
            if at is None:
                axes.text(*where, words, **look)
            else:
                axes.annotate(words, at, where, arrowprops=arrow, **look)
        return picture

    return FigureResult(draw, _ids(frame), (_when(frame, "block"),))


def over_steps(results: Results) -> Picture:
    """Layer 1 from window to window: along the BF16 trunk, where errors are recorded, and on under Block."""
    part = chosen(results, "partitions", "1")
    if isinstance(part, NotRun):
        return part
    frame = decisions(part)
    frame = frame[frame["arm"].isin((TRUNK, "block")) & (frame["block"] == 0)]
    if frame.empty:
        return NoData("no window of layer 1 was recorded")
    tensors = (("fc2 input", "down", INPUT), ("fc1 grad", "up", GRADIENT), ("linear_qkv grad", "qkv", GRADIENT))
    steps = sorted(frame["line_step"].unique())
    arms = frame.groupby("line_step")["arm"].first()

    def draw() -> Figure:
        picture, (panels,) = plots.panels(1, len(tensors), _height(len(steps)) + 0.15)
        for i, (axes, (title, layer, kind)) in enumerate(zip(panels, tensors, strict=True)):
            of = frame[(frame["part"] == layer) & (frame["slot"] == kind.slot)]
            rows = [
                HeatRow(
                    f"{step}", counts(of[of["line_step"] == step]), "BF16 trunk" if arms[step] == TRUNK else "Block"
                )
                for step in steps
            ]
            heat.heat_map(axes, rows, EDGES, THRESHOLD, labels=i == 0)
            axes.set_title(title)
        panels[0].annotate(
            "step",
            (0, 1),
            (-4, 4),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            fontsize=plots.SMALL,
            color=plots.theme().quiet,
        )
        panels[1].set_xlabel(ERROR)
        heat.shades_key(picture, panels, SHADES, LINE)
        return picture

    notes = ("Layer 1. Along the trunk nothing is quantized; the errors are those that E4M3 would have made.",)
    return FigureResult(draw, _ids(frame), notes + _seeds(frame))


def beside_block(results: Results) -> Picture:
    """The tensors that the paper names, in all layers, under tensor and under block partition."""
    frames = {arm: _last(results, arm, "1") for arm in ("tensor", "block")}
    first = frames["tensor"]
    if not isinstance(first, pd.DataFrame):
        return first
    layers = spaced(_layers(first), 8)
    named = (("down", INPUT), ("qkv", GRADIENT), ("up", GRADIENT))
    found = {arm: frame for arm, frame in frames.items() if isinstance(frame, pd.DataFrame)}
    rows = {
        arm: [row for layer in layers for part, kind in named for row in _rows(frame, [layer], (kind,), (part,))]
        for arm, frame in found.items()
    }

    def draw() -> Figure:
        picture, (panels,) = plots.panels(1, len(rows), _height(len(rows["tensor"])) + 0.15)
        for i, (axes, (arm, lines)) in enumerate(zip(panels, rows.items(), strict=True)):
            heat.heat_map(axes, lines, EDGES, THRESHOLD, labels=i == 0)
            axes.set_title(f"{ARMS[arm].label} partition")
            axes.set_xlabel(ERROR if len(rows) == 1 else "relative error, %")
        heat.shades_key(picture, panels, SHADES, LINE)
        return picture

    notes = (_when(first, "tensor"), "The same tensors under block partition beside them.")
    return FigureResult(draw, tuple(i for frame in found.values() for i in _ids(frame)), notes)


def ends(layers: int, each: int) -> list[int]:
    """So many first and so many last ones."""
    return list(range(layers)) if layers <= 2 * each else [*range(each), *range(layers - each, layers)]


def spaced(layers: int, most: int) -> list[int]:
    """The first, the last, and what lies evenly between."""
    return sorted({round(i) for i in np.linspace(0, layers - 1, min(most, layers))})


# -------------------------------------------------------------------------------- details


def _last(results: Results, arm: str, configuration: str) -> pd.DataFrame | NoData | NotRun:
    """The arm's numerics of the last window of training, which trials that are not done have not seen."""
    part = chosen(results, "partitions", configuration)
    if isinstance(part, NotRun):
        return part
    if not part.has(arm):
        return NotRun(part.members[0].scale)
    frame = decisions(part)
    frame = at_end(frame[(frame["arm"] == arm) & (frame["state"] == State.DONE)])
    return NoData(f"no trial of {ARMS[arm].label} is done, with its errors recorded") if frame.empty else frame


def _rows(
    frame: pd.DataFrame, layers: Iterable[int], kinds: Sequence[Kind], parts: Sequence[str] = ()
) -> list[HeatRow]:
    found = []
    for layer in layers:
        of = frame[frame["block"] == layer]
        for part in parts or [p for p in PARTS if p in set(of["part"])]:
            for kind in kinds:
                rows = of[(of["part"] == part) & (of["slot"] == kind.slot)]
                found.append(HeatRow(f"{PARTS[part]} {kind.label}", counts(rows), f"layer {layer + 1}"))
    return found


def _layers(frame: pd.DataFrame) -> int:
    return 1 + int(frame["block"].max())


def _height(rows: int) -> float:
    return 1.3 + heat.ROW * rows


def _ids(frame: pd.DataFrame) -> tuple[str, ...]:
    return tuple(dict.fromkeys(frame["id"]))


def _seeds(frame: pd.DataFrame) -> tuple[str, ...]:
    seeds = sorted(frame["seed"].unique())
    return (f"Counts are summed over {len(seeds)} seeds.",) if len(seeds) > 1 else ("One seed.",)


def _when(frame: pd.DataFrame, arm: str) -> str:
    batches = int(frame.groupby(["layer", "slot"])["batches"].sum().max())
    (seeds,) = _seeds(frame)
    return f"{ARMS[arm].label}, the last window: {batches} mini-batches a row. {seeds}"
