"""Draw the share of tensors in BF16 over training (Figure 10), by threshold (Figure B) and by size (Figure D)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fewbits.analysis.engine.claims.schema import LOSS
from fewbits.analysis.engine.results.data import Differences, NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import paired, sample
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import BASELINE, arm_table, not_planned, sweep_places
from fewbits.analysis.figures import series
from fewbits.analysis.figures.panels import Line, Panel, PaperMark, Rule, curve_figure
from fewbits.analysis.figures.series import means_with_band
from fewbits.analysis.figures.theme import QUIET, STYLES, Style
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.mor import tensors
from fewbits.analysis.studies.mor.tensors import ONE, THRESHOLD, TRUNK, TWO, WATCHED
from fewbits.kernels.quantizer import Mixture
from fewbits.sweeps.planning.store import State

ARMS = ("block", "tensor", "channel")
OBSERVED = "BF16 run: block's error ≥ 4.5 %"
SHARES = "decisions for BF16, %"
NUMBERS = paper("mor").numbers

Values = Mapping[float, Sequence[float]]  # by x, a number for each seed


def line_of(found: Values, style: Style, label: str) -> Line:
    means, band = means_with_band(found[x] for x in sorted(found))
    return Line(np.array(sorted(found)), means, style, label, band, points=True)


# -------------------------------------------------------------------------------- over training


@figure("mor", "Figure 10")
def figure_10(results: Results) -> Picture:
    """Draw the share of decisions for BF16 over the steps of the trunk and of the arms that branch from it."""
    found = {place: sweep_places(results, "partitions", where) for place, where in (("1", ONE), ("2", TWO))}
    shares = {place: tensors.fallback_over_steps(part) for place, part in found.items() if isinstance(part, Results)}
    if not shares:
        return not_planned(results)
    if all(frame.empty for frame in shares.values()):
        return NoData("no decision was recorded: no trial has chosen between E4M3 and BF16 yet")

    def panel(place: str) -> Panel:
        title, table = f"Configuration {place}: decisions for BF16, %", arm_table("mor")
        if place not in shares:
            return Panel(title, empty=not_planned(results).reason)
        curves = {arm: series.level(shares[place], arm) for arm in (TRUNK, WATCHED, *ARMS)}
        styles = {arm: STYLES[table.arm(arm).style or 0] for arm in ARMS}
        lines = [
            Line(one.tokens, one.mean, styles[arm], table.label(arm), one.band, points=True, side_by_side=True)
            if arm in ARMS
            else Line(one.tokens, one.mean, QUIET, OBSERVED, points=False, secondary=True)
            for arm, one in curves.items()
            if one is not None
        ]
        ends = [] if (trunk := curves[TRUNK]) is None else [float(trunk.tokens[-1])]
        marks = (PaperMark(NUMBERS["fallback-channel-c1"].value, styles["channel"]),) if place == "1" else ()
        below = "step" + "".join(f"; arms branch from the trunk at {end:g}" for end in ends)
        rules = tuple(Rule(end, upright=True) for end in ends)
        return Panel(title, tuple(lines), rules, marks, x_label=below, y_axis="percent", y_limits=(0, None))

    def draw() -> Figure:
        heights = [1.9 if place in shares else 0.6 for place in found]
        rows = [[panel(place)] for place in found]
        key = "the paper's 1.62 % (channel)"
        return curve_figure(rows, height=0.5 + sum(heights), columns=2, paper=key, height_ratios=heights)

    notes = (
        "A decision is for one tensor in one mini-batch; with Channel, for one direction of a tensor. Before the "
        "branch: the decisions of Block, had it been used, from errors that were recorded along the BF16 trunk.",
    )
    return FigureResult(draw, tuple(dict.fromkeys(i for frame in shares.values() for i in frame["id"])), notes)


# -------------------------------------------------------------------------------- by threshold

AXIS = "recipe.threshold"
BLOCKS = ("128x128", "tensor", "channel")  # the position gives the colour
SCALINGS = {"gam": "GAM", "amax": "FP32 amax", "e8m0": "E8M0"}  # labels; the position gives dashes and marker
PAPERS = Rule(THRESHOLD, label="the paper's, 4.5 %", upright=True)


@figure("mor", "Figure B", "Thresholds: share of fallbacks and change of loss")
def thresholds(results: Results) -> Picture:
    """Draw the share of decisions for BF16 and the validation loss by threshold, for each model."""
    lines: dict[tuple[str, str, tuple[tuple[str, str], ...]], dict[str, str]] = {}  # to {threshold: trial}
    for member in results.members:
        axes = dict(member.cell.axes)
        if AXIS in axes:
            threshold = axes.pop(AXIS)
            key = (member.cell.sweep, str(member.cell.arm), tuple(axes.items()))
            lines.setdefault(key, {})[threshold] = member.id
    if not lines:
        return not_planned(results)
    shares: dict[str, list[Line]] = {}  # by model
    changes: dict[str, list[Line]] = {}
    for (sweep, arm, rest), trials in lines.items():
        part, trial = results.of_sweep(sweep), results.plan.trials[next(iter(trials.values()))].trial
        fallback = tensors.fallback_shares(tensors.tensors(part))
        measures: dict[int, dict[float, Sequence[float]]] = {}
        for text in trials:
            where = {**dict(rest), AXIS: text}
            both = sample(part, fallback, arm, where), paired(part, LOSS, arm, BASELINE, where)
            for kind, data in enumerate(both):
                if isinstance(data, Differences) and data.values:
                    measures.setdefault(kind, {})[float(text)] = data.values
        quantizer = Mixture.parse(trial.recipe.fprop.x).entries[0].quantizer
        block, scaling = str(quantizer.block), str(quantizer.scaling)
        label = f"{block.replace('x', '×')}, {SCALINGS.get(scaling, scaling)}"
        colour = BLOCKS.index(block) if block in BLOCKS else len(BLOCKS)
        style = replace(STYLES[list(SCALINGS).index(scaling) if scaling in SCALINGS else 3], colour=colour)
        for kind, lists in enumerate((shares, changes)):
            of_model = lists.setdefault(trial.model.name, [])
            of_model += [line_of(measures[kind], style, label)] if kind in measures else []
    if not any((*shares.values(), *changes.values())):
        return NoData("no trial with a threshold is finished")

    def draw() -> Figure:
        options: dict[str, Any] = {"x_axis": "percent", "y_limits": (0, None), "y_axis": "percent"}
        above = [Panel(model, tuple(lines), (PAPERS,), **options) for model, lines in shares.items()]
        options |= {"x_label": "threshold, %", "y_limits": (None, None), "y_axis": "change"}
        below = [Panel("", tuple(lines), (Rule(0, "text"), PAPERS), **options) for lines in changes.values()]
        above[0] = replace(above[0], y_label=SHARES)
        below[0] = replace(below[0], y_label="validation loss,\nchange from BF16, %")
        return curve_figure([above, below], height=4.4, sharex=True, sharey="row")

    trials_shown = tuple(dict.fromkeys(m.id for m in results.members if AXIS in dict(m.cell.axes)))
    notes = ("Means over seeds with 90 % intervals. Colours stand for blocks, dashes for scalings.",)
    return FigureResult(draw, trials_shown, notes)


# -------------------------------------------------------------------------------- by size

RECIPES = ("ladder-block", "ladder-always-tensor", "ladder-always-block", "ladder-e5m2", "ladder-nvfp4")


@figure("mor", "Figure D", "Recipes against the size of the model")
def ladder(results: Results) -> Picture:
    """Draw recipes' gradient error and increase of the loss, and MoR's decisions for BF16, by size of the model."""
    part = sweep_places(results, "ladder")
    if not isinstance(part, Results):
        return not_planned(results)
    measures = {
        "error of the gradient, %": (part.numbers("gradient_error"), RECIPES),
        "increase of the loss, %": (part.numbers("increase_relative"), RECIPES),
        SHARES: (tensors.fallback_shares(tensors.tensors(part)), RECIPES[:1]),
    }
    found: dict[str, dict[str, dict[float, list[float]]]] = {title: {} for title in measures}
    for title, (numbers, arms) in measures.items():
        for row in part.rows:
            if row["arm"] in arms and row["state"] == State.DONE and row["id"] in numbers:
                sizes = found[title].setdefault(row["arm"], {})
                sizes.setdefault(row["parameters"] / 1e6, []).append(numbers[row["id"]])
    if not any(found.values()):
        return NoData("no probe of the ladder is finished")
    last = (PaperMark(1 - NUMBERS["threshold-share"].value, STYLES[0]),)

    def draw() -> Figure:
        panels, label = [], arm_table("mor").label
        for title, arms in found.items():
            lines = tuple(line_of(sizes, STYLES[RECIPES.index(arm)], label(arm)) for arm, sizes in arms.items())
            marks, limits = (last, (0, None)) if title == SHARES else ((), (None, None))
            axes: dict[str, Any] = {"x_label": "parameters, M", "y_label": title, "x_axis": "log", "y_axis": "percent"}
            panels.append(Panel("", lines, (Rule(0, "text"),), marks, y_limits=limits, **axes))
        return curve_figure([panels], height=2.6, paper="the paper's threshold")

    notes = (
        "Trunks have equally many tokens per parameter, and a learning rate that falls with the width. The hollow mark "
        "is the share of tensors in BF16 for which the paper chose its threshold, at 8.5 B parameters.",
    )
    return FigureResult(draw, tuple(m.id for m in part.members if m.cell.arm in RECIPES), notes)
