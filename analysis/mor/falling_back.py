"""Figure 10: how often tensors fall back to BF16 as training goes on."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fewbits.analysis import plots, trajectories
from fewbits.analysis.arms import BASELINE, TRUNK
from fewbits.analysis.engine.data import NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.mor.decisions import fallback_over_steps
from fewbits.analysis.mor.looks import (
    ARMS,
    PARTITIONS,
    PARTITIONS_2,
    Comparison,
    chosen,
)
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture


@figure("mor", "Figure 10")
def figure_10(results: Results) -> Picture:
    return fallback(results, {"Configuration 1": PARTITIONS, "Configuration 2": PARTITIONS_2})


def fallback(results: Results, comparisons: dict[str, Comparison]) -> Picture:
    """The share of decisions for BF16, window by window, before and after arms leave the trunk."""
    parts = {name: chosen(results, of.sweep, of.configuration) for name, of in comparisons.items()}
    run = {name: part for name, part in parts.items() if isinstance(part, Results)}
    if not run:
        return next(part for part in parts.values() if isinstance(part, NotRun))
    shares = {name: fallback_over_steps(part) for name, part in run.items()}
    there = {arm for frame in shares.values() for arm in frame["arm"]}
    arms = [arm for arm in PARTITIONS.arms if arm in there]
    if not there:
        return NoData("no decision was recorded")

    def draw() -> Figure:
        picture, grid = plots.panels(
            len(comparisons),
            1,
            0.5 + 1.9 * len(run) + 0.7 * (len(comparisons) - len(run)),
            height_ratios=[1.9 if name in run else 0.6 for name in comparisons],
        )
        for (axes,), (name, of) in zip(grid, comparisons.items(), strict=True):
            axes.set_title(f"{name}: decisions for BF16, %")
            if name in run:
                _shares(axes, shares[name], of)
            else:
                plots.instead(axes, str(parts[name]))
        extra = [Line2D([], [], color=plots.theme().quiet, label="BF16 run: block's error ≥ 4.5 %")]
        plots.legend(
            picture,
            [(ARMS[a].label, ARMS[a].look) for a in arms],
            columns=2,
            extra=[*extra, plots.hollow("the paper's 1.62 % (channel)")],
        )
        return picture

    notes = (
        "A decision covers a tensor of a mini-batch; under channel each direction has its own. "
        "Before the branch, what Block would have decided, from the errors recorded along the BF16 trunk.",
    )
    trials = tuple(dict.fromkeys(i for frame in shares.values() for i in frame["id"]))
    return FigureResult(draw, trials, notes)


def _shares(axes: Axes, frame: pd.DataFrame, of: Comparison) -> None:
    where = ""
    for arm, look in ((TRUNK, None), ("watched", None), *((a, ARMS[a].look) for a in of.arms if a != BASELINE)):
        series = trajectories.level(frame, arm)
        if series is None:
            continue
        if look is None:
            axes.plot(series.tokens, series.mean, color=plots.theme().quiet)
        else:
            plots.curve(axes, look, series.tokens, series.mean, series.band, points=True)
        if arm == TRUNK:
            axes.axvline(series.tokens[-1], color=plots.theme().quiet, linewidth=0.7)
            where = f"; arms leave the trunk at {series.tokens[-1]:g}"
    if of.configuration == "1":
        look = ARMS["channel"].look
        axes.plot(
            [1.015],
            [paper("mor").numbers["fallback-channel-c1"].value],
            look.marker,
            transform=axes.get_yaxis_transform(),
            mfc="none",
            mec=look.shade,
            clip_on=False,
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(plots.percent())
    axes.set_xlabel(f"step{where}")
