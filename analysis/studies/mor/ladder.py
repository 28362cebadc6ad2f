"""Draw Figure D: how the gradient error, the loss and the fallbacks of recipes change with the size of the model."""

from __future__ import annotations

from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import not_planned, sweep_places
from fewbits.analysis.engine.statistics.estimates import ALPHA, summary
from fewbits.analysis.figures.curves import Line, Panel, PaperMark, Rule, curve_figure
from fewbits.analysis.figures.series import band_of, means_of
from fewbits.analysis.figures.theme import STYLES, Style
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.report.registry import figure
from fewbits.analysis.studies.mor.tensors import fallback_shares, tensors
from fewbits.sweeps.planning.store import State

SWEEP = "ladder"
ARMS = ("ladder-block", "ladder-always-tensor", "ladder-always-block", "ladder-e5m2", "ladder-nvfp4")
MEASURES = {"gradient_error": "error of the gradient, %", "increase_relative": "increase of the loss, %"}
FALLBACK = "decisions for BF16, %"

Points = dict[str, dict[int, dict[int, float]]]  # points[arm][number of parameters][seed]


@figure("mor", "Figure D", "Recipes against the size of the model")
def ladder(results: Results) -> Picture:
    """Draw, by size of the model, each recipe's gradient error and increase of the loss, and MoR's decisions for BF16.

    Probes measured these numbers at the end of a BF16 trunk of each size. The figure's notes state how fast the numbers
    change with the size.
    """
    of_sweep = sweep_places(results, SWEEP)
    if not isinstance(of_sweep, Results):
        return not_planned(results)
    found = {title: _points(of_sweep, of_sweep.numbers(measure)) for measure, title in MEASURES.items()}
    found[FALLBACK] = _points(of_sweep, fallback_shares(tensors(of_sweep)), arms=("ladder-block",))
    if not any(found.values()):
        return NoData("no probe of the ladder is finished")
    papers = (PaperMark(1 - paper("mor").numbers["threshold-share"].value, _style("ladder-block")),)

    def draw() -> Figure:
        panels = [
            Panel(
                lines=_lines(points),
                rules=(Rule(0, "text"),),
                paper=papers if title == FALLBACK else (),
                x_label="parameters, M",
                y_label=title,
                x_axis="log",
                y_axis="percent",
                y_limits=(0 if title == FALLBACK else None, None),
            )
            for title, points in found.items()
        ]
        return curve_figure([panels], height=2.6, paper="the paper's threshold")

    trends = [note for title, points in found.items() for note in _trends(title, points)]
    notes = (
        "Trunks have equally many tokens per parameter, and a learning rate that falls with the width.",
        "The hollow mark is the share of tensors in BF16 for which the paper chose its threshold, at 8.5 B parameters.",
        *trends,
    )
    return FigureResult(draw, tuple(m.id for m in of_sweep.members if m.cell.arm in ARMS), notes)


def _points(of_sweep: Results, numbers: dict[str, float], arms: tuple[str, ...] = ARMS) -> Points:
    """Return `numbers` by arm, number of parameters and seed, for the finished trials of these arms.

    of_sweep: the results of the sweep `ladder`. numbers: the value of one measured quantity by trial id.
    """
    points: Points = {}
    for row in of_sweep.rows:
        if row["arm"] in arms and row["state"] == State.DONE and row["id"] in numbers:
            sizes = points.setdefault(row["arm"], {})
            sizes.setdefault(int(row["parameters"]), {})[int(row["seed"])] = numbers[row["id"]]
    return points


def _lines(points: Points) -> tuple[Line, ...]:
    lines = []
    for arm, sizes in points.items():
        found = [summary(list(seeds.values()), 1 - 2 * ALPHA) for _, seeds in sorted(sizes.items())]
        x = np.array(sorted(sizes)) / 1e6
        lines.append(Line(x, means_of(found), _style(arm), arm_table("mor").label(arm), band_of(found), points=True))
    return tuple(lines)


def _style(arm: str) -> Style:
    return STYLES[ARMS.index(arm)]


def _trends(title: str, points: Points) -> list[str]:
    """Return a note for each arm: the slope of a measured quantity over log10 of the number of parameters.

    The slope is a mean over the seeds that have a number at every size; if there are several such seeds, the note also
    has its 90 % confidence interval. Arms with only one size or without such a seed have no note. title: the name of
    the quantity, with which each note begins. points: the values of the quantity, from `_points`.
    """
    notes = []
    for arm, sizes in points.items():
        seeds = set.intersection(*(set(of_seed) for of_seed in sizes.values()))
        if len(sizes) < 2 or not seeds:
            continue
        x = np.log10(sorted(sizes))
        slopes = [float(np.polyfit(x, [sizes[size][seed] for size in sorted(sizes)], 1)[0]) for seed in sorted(seeds)]
        interval = summary(slopes, 1 - 2 * ALPHA).interval
        ends = f", 90 % interval {100 * interval.low:+.3g} to {100 * interval.high:+.3g}" if interval else ""
        label = arm_table("mor").label(arm)
        notes.append(f"{title.removesuffix(', %')}, {label}: {100 * fmean(slopes):+.3g} points per factor of ten{ends}")
    return notes
