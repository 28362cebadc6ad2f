"""Draw the share of tensors that fall back to BF16: over training (Figure 10), and by tensor and layer (Figure C)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import not_planned, sweep_places
from fewbits.analysis.figures import series
from fewbits.analysis.figures.curves import Line, Panel, PaperMark, Rule, curve_figure
from fewbits.analysis.figures.heat_map import HeatMap, HeatRow, heat_map_figure
from fewbits.analysis.figures.theme import QUIET, STYLES, Style
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.mor.tensors import (
    ONE,
    PARTS,
    TITLES,
    TRUNK,
    TWO,
    WATCHED,
    decisions,
    fallback_over_steps,
)

ARMS = ("block", "tensor", "channel")
OBSERVED = "BF16 run: block's error ≥ 4.5 %"
KINDS = {"x": "input", "w": "weight", "dy": "grad"}  # by the last part of a slot's name, the label of the tensor


def style(arm: str) -> Style:
    """Return the colour, dashes and marker that an arm's line has in all figures of the study."""
    place = arm_table("mor").arm(arm).style
    assert place is not None
    return STYLES[place]


# -------------------------------------------------------------------------------- Figure 10


@figure("mor", "Figure 10")
def figure_10(results: Results) -> Picture:
    """Draw the share of decisions for BF16 over the steps of the trunk and of the arms that branch from it."""
    parts = {"Configuration 1": ONE, "Configuration 2": TWO}
    found = {name: sweep_places(results, "partitions", where) for name, where in parts.items()}
    shares = {name: fallback_over_steps(part) for name, part in found.items() if isinstance(part, Results)}
    if not shares:
        return not_planned(results)
    if all(frame.empty for frame in shares.values()):
        return NoData("no decision was recorded: no trial has chosen between E4M3 and BF16 yet")

    def draw() -> Figure:
        rows = [[_shares_panel(name, shares[name]) if name in shares else _empty(name, results)] for name in parts]
        heights = [1.9 if name in shares else 0.6 for name in parts]
        key = "the paper's 1.62 % (channel)"
        return curve_figure(rows, height=0.5 + sum(heights), columns=2, paper=key, height_ratios=heights)

    notes = (
        "A decision is for one tensor in one mini-batch; with Channel, for one direction of a tensor. "
        "Before the branch: the decisions that Block would have made, from errors that were recorded along the BF16 "
        "trunk.",
    )
    return FigureResult(draw, tuple(dict.fromkeys(i for frame in shares.values() for i in frame["id"])), notes)


def _empty(name: str, results: Results) -> Panel:
    """Return a panel without curves, which states that a training configuration is not run at this scale.

    name: the configuration as it is called in the panel's title, such as Configuration 1.
    """
    return Panel(f"{name}: decisions for BF16, %", empty=not_planned(results).reason)


def _shares_panel(name: str, frame: pd.DataFrame) -> Panel:
    table, lines = arm_table("mor"), []
    found = {arm: series.level(frame, arm) for arm in (TRUNK, WATCHED, *ARMS)}
    for arm, one in found.items():
        if one is None:
            continue
        if arm in ARMS:
            line = Line(one.tokens, one.mean, style(arm), table.label(arm), one.band, points=True, side_by_side=True)
        else:
            line = Line(one.tokens, one.mean, QUIET, OBSERVED, points=False, secondary=True)
        lines.append(line)
    trunk = found[TRUNK]
    branch = () if trunk is None else (Rule(float(trunk.tokens[-1]), upright=True),)
    known = paper("mor").numbers["fallback-channel-c1"].value
    return Panel(
        f"{name}: decisions for BF16, %",
        tuple(lines),
        branch,
        (PaperMark(known, style("channel")),) if name == "Configuration 1" else (),
        x_label="step" + (f"; arms branch from the trunk at {trunk.tokens[-1]:g}" if trunk is not None else ""),
        y_axis="percent",
        y_limits=(0, None),
    )


# -------------------------------------------------------------------------------- Figure C


@figure("mor", "Figure C", "Where tensors fall back")
def fallback_by_layer(results: Results) -> Picture:
    """Draw two heat maps of the share of decisions for BF16, with a column for each arm.

    The first map has a row for each tensor of the linear layers, the second one for each block (layer) of the model.
    """
    found: dict[str, pd.DataFrame] = {}
    places = [sweep_places(results, sweep, ONE) for sweep in ("partitions", "ablations", "sub-tensor")]
    planned = [part for part in places if isinstance(part, Results)]
    if not planned:
        return not_planned(results)
    for part in planned:
        frame = decisions(part)
        for arm in arm_table("mor").lists["mixtures"]:
            if arm not in found and len(rows := frame[frame["arm"] == arm]):
                found[arm] = rows.assign(kind=rows["slot"].str.split(".").str[1].map(KINDS))
    if not found:
        return NoData("no decision was recorded: no trial has chosen between E4M3 and BF16 yet")
    arms = [arm for arm in arm_table("mor").lists["mixtures"] if arm in found]
    layers = sorted({int(layer) for rows in found.values() for layer in rows["block"].unique()})
    of_tensor = {arm: rows.groupby(["part", "kind"])["fallback"].mean().to_dict() for arm, rows in found.items()}
    of_layer = {arm: rows.groupby("block")["fallback"].mean().to_dict() for arm, rows in found.items()}
    tensors = tuple(
        HeatRow(f"{TITLES[part]} {kind}", np.array([of_tensor[arm].get((part, kind), math.nan) for arm in arms]))
        for part in PARTS
        for kind in KINDS.values()
    )
    by_layer = tuple(
        HeatRow(f"layer {layer + 1}", np.array([of_layer[arm].get(layer, math.nan) for arm in arms]))
        for layer in layers
    )

    def draw() -> Figure:
        names = tuple(map(arm_table("mor").label, arms))
        return heat_map_figure(
            [
                HeatMap(tensors, names, "Decisions for BF16, %", spell=_in_percent, columns_above=True),
                HeatMap(by_layer, ("",) * len(arms), spell=_in_percent),
            ]
        )

    notes = (
        "Share of decisions for BF16 in percent, mean over the branch and seeds; configuration 1. Empty cells: no "
        "fallback, or no such tensor in the model. Two-way and Three-way decide for each block, the other arms for "
        "each tensor.",
    )
    return FigureResult(draw, tuple(dict.fromkeys(i for rows in found.values() for i in rows["id"])), notes)


def _in_percent(value: float) -> str:
    return f"{100 * value:.0f}" if value >= 0.0995 else f"{100 * value:.1f}" if value >= 0.0005 else "<0.1"
