"""Figures 5, 6, 8 and 20: how arms train beside BF16.

Arms differ by a tenth of a percent, so beside the curves themselves stand their changes from BF16, seed by seed. The
paper's last numbers are hollow marks at the right edge: of a model and a training far larger than ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fewbits.analysis import plots
from fewbits.analysis.frames import Results
from fewbits.analysis.mor import trajectories
from fewbits.analysis.mor.looks import (
    ABLATIONS,
    AGAIN,
    ARMS,
    BF16,
    PARTITIONS,
    PARTITIONS_2,
    SUB_TENSOR,
    TRUNK,
    Comparison,
    chosen,
)
from fewbits.analysis.mor.trajectories import Series
from fewbits.analysis.plots import Look
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture
from fewbits.analysis.verdicts import NoData

LEAST = 1e-5  # half of the smallest range that a panel of changes shows
NOISE = Look(None, (1, 1.6), "x")


@dataclass(frozen=True)
class Metric:
    name: str
    title: str
    unit: str
    every_step: bool = False  # so that it is averaged over steps to be legible
    in_paper: bool = False


LOSS = Metric("loss", "Training loss", "nats", every_step=True, in_paper=True)
VALIDATION = Metric("validation_loss", "Validation loss", "nats", in_paper=True)
NORM = Metric("parameter_norm", "Parameter norm", "L2")


@figure("mor", "Figure 5")
def figure_5(results: Results) -> Picture:
    return training(results, PARTITIONS, (LOSS, VALIDATION, NORM))


@figure("mor", "Figure 6")
def figure_6(results: Results) -> Picture:
    return training(results, PARTITIONS_2, (LOSS, VALIDATION, NORM))


@figure("mor", "Figure 8")
def figure_8(results: Results) -> Picture:
    return training(results, ABLATIONS, (LOSS, VALIDATION, NORM))


@figure("mor", "Figure 20")
def figure_20(results: Results) -> Picture:
    return training(results, SUB_TENSOR, (LOSS, VALIDATION))


# -------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Measured:
    """What one row of panels shows of one metric."""

    levels: dict[str, Series]  # of arms, those there are; the trunk's among them
    changes: dict[str, Series]  # from BF16; A/A's among them
    trials: tuple[str, ...]


def measured(results: Results, part: Results, of: Comparison, metric: Metric) -> Measured:
    """part: the comparison's own places. A/A is taken from wherever it is run in the same configuration."""
    frame = _recorded(part, metric)
    levels = {arm: trajectories.level(frame, arm) for arm in (*of.arms, TRUNK)}
    changes = {arm: trajectories.change(frame, arm, BF16) for arm in of.arms if arm != BF16}
    both = chosen(results, PARTITIONS.sweep, of.configuration)
    if isinstance(both, Results) and both.has(AGAIN):
        changes[AGAIN] = trajectories.change(_recorded(both, metric), AGAIN, BF16)
    trials = (one.trials for one in (*levels.values(), *changes.values()) if one is not None)
    return Measured(
        {arm: one for arm, one in levels.items() if one is not None},
        {arm: one for arm, one in changes.items() if one is not None},
        tuple(dict.fromkeys(trial for some in trials for trial in some)),
    )


def _recorded(part: Results, metric: Metric) -> pd.DataFrame:
    frame = trajectories.curves(part, metric.name)
    return trajectories.smoothed(frame, part) if metric.every_step else frame


def training(results: Results, of: Comparison, metrics: Sequence[Metric]) -> Picture:
    """A row of panels for each metric: as it is, and its change from BF16."""
    part = chosen(results, of.sweep, of.configuration)
    if isinstance(part, NotRun):
        return part
    found = {metric: measured(results, part, of, metric) for metric in metrics}
    there = {arm for one in found.values() for arm in one.levels}
    if not there & set(of.arms):
        return NoData(f"no curve of {', '.join(ARMS[arm].label for arm in of.arms)}")

    def draw() -> Figure:
        picture, grid = plots.panels(len(metrics), 2, 0.45 + 1.62 * len(metrics), sharex="col")
        for row, (metric, one) in zip(grid, found.items(), strict=True):
            last = metric is metrics[-1]
            _levels(row[0], one, of, metric, label_x=last)
            changes(row[1], one, of, metric, label_x=last)
        extra = [Line2D([], [], color=plots.theme().quiet, label="trunk, BF16")] if TRUNK in there else []
        extra += noise_key(found.values())
        extra += [plots.hollow("the paper's last")] if any(m.in_paper for m in metrics) else []
        plots.legend(picture, [(ARMS[a].label, ARMS[a].look) for a in of.arms if a in there], extra=extra)
        return picture

    notes: tuple[str, ...] = (
        "Left: mean and range of seeds. Right: mean of the seeds' paired changes and its 90 % interval.",
    )
    if any(metric.every_step for metric in metrics):
        notes += (f"The training loss is averaged over steps to {trajectories.POINTS} points of each curve.",)
    notes += trajectories.diverged(part, of.arms) + lacking(there, of)
    return FigureResult(draw, tuple(dict.fromkeys(i for one in found.values() for i in one.trials)), notes)


def _levels(axes: Axes, found: Measured, of: Comparison, metric: Metric, *, label_x: bool) -> None:
    axes.set_title(f"{metric.title}, {metric.unit}")
    if (trunk := found.levels.get(TRUNK)) is not None:
        axes.plot(trunk.tokens, trunk.mean, color=plots.theme().quiet, marker="o" if trunk.few else "", markersize=2)
        axes.axvline(trunk.tokens[-1], color=plots.theme().quiet, linewidth=0.7)
    for arm in of.arms:
        _draw(axes, ARMS[arm].look, found.levels.get(arm))
    if not found.levels:
        plots.instead(axes, "no data")
    plots.tokens_axis(axes, label_x)


def changes(axes: Axes, found: Measured, of: Comparison, metric: Metric, *, label_x: bool) -> None:
    """From BF16; with what BF16 differs from itself by, and where the paper's arms ended."""
    axes.set_title("Change from BF16, %")
    _draw(axes, NOISE, found.changes.get(AGAIN))
    for arm in of.arms:
        _draw(axes, ARMS[arm].look, found.changes.get(arm))
    if not found.changes:
        plots.instead(axes, "no pair of trials")
        return
    axes.axhline(0, color=plots.theme().text, linewidth=1)
    if np.ptp(axes.get_ylim()) < 2 * LEAST:  # the same to the last bits: no axis of rounding
        axes.set_ylim(-LEAST, LEAST)
    axes.yaxis.set_major_formatter(plots.percent(signed=True))
    axes.locator_params(axis="y", nbins=5)
    plots.tokens_axis(axes, label_x)
    if metric.in_paper:
        _paper_marks(axes, of, metric)


def noise_key(found: Iterable[Measured]) -> list[Line2D]:
    """For a legend, where A/A is shown."""
    style: Any = NOISE.dashes
    there = any(AGAIN in one.changes for one in found)
    return (
        [Line2D([], [], color=NOISE.shade, dashes=style, marker=NOISE.marker, label="A/A: BF16 again")] if there else []
    )


def _paper_marks(axes: Axes, of: Comparison, metric: Metric) -> None:
    """Right of the panel, beside each other."""
    for i, arm in enumerate(arm for arm in of.arms if arm != BF16):
        value, look, beside = of.paper_change(metric.name, arm), ARMS[arm].look, axes.get_yaxis_transform()
        if value is not None:
            axes.plot(
                [1.03 + 0.045 * i], [value], look.marker, mfc="none", mec=look.shade, transform=beside, clip_on=False
            )


def _draw(axes: Axes, look: Look, series: Series | None) -> None:
    if series is not None:
        plots.curve(axes, look, series.tokens, series.mean, series.band, points=series.few)


def lacking(there: Collection[str], of: Comparison) -> tuple[str, ...]:
    missing = [ARMS[arm].label for arm in of.arms if arm not in there]
    return (f"No data of {', '.join(missing)}.",) if missing else ()
