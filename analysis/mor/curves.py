"""Figures 5, 6, 8 and 20: how arms train beside BF16.

Arms differ by a tenth of a percent, so beside the curves themselves stand their changes from BF16, seed by seed. The
paper's last numbers are hollow marks at the right edge: of a model and a training far larger than ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def training(results: Results, of: Comparison, metrics: Sequence[Metric]) -> Picture:
    """A row of panels for each metric: as it is, and its change from BF16."""
    part = chosen(results, of.sweep, of.configuration)
    if isinstance(part, NotRun):
        return part
    frames = {metric: recorded(part, metric) for metric in metrics}
    shown = shown_of(frames[metrics[0]], of)
    if not shown:
        return NoData(f"no curve of {', '.join(of.arms)}")
    again = noise(results, of.configuration, metrics)

    def draw() -> Figure:
        picture, grid = plots.panels(len(metrics), 2, 0.45 + 1.62 * len(metrics), sharex="col")
        for row, metric in zip(grid, metrics, strict=True):
            frame, last = frames[metric], metric is metrics[-1]
            _levels(row[0], frame, of, metric, label_x=last)
            changes(row[1], frame, again.get(metric), of, metric, label_x=last)
        extra = [plots.hollow("the paper's last")] if any(m.in_paper for m in metrics) else []
        if any(frame is not None and not frame.empty for frame in again.values()):
            extra.insert(0, key("A/A: BF16 again", NOISE))
        if not frames[metrics[0]][frames[metrics[0]]["arm"] == TRUNK].empty:
            extra.insert(0, Line2D([], [], color=plots.theme().quiet, label="trunk, BF16"))
        plots.legend(picture, [(ARMS[a].label, ARMS[a].look) for a in shown], extra=extra)
        return picture

    notes: tuple[str, ...] = (
        "Left: mean and range of seeds. Right: mean of the seeds' paired changes and its 90 % interval.",
    )
    if any(metric.every_step for metric in metrics):
        notes += (f"The training loss is averaged over steps to {trajectories.POINTS} points of each curve.",)
    return FigureResult(draw, _trials(frames, of), notes + trajectories.diverged(part, of.arms) + lacking(shown, of))


def recorded(part: Results, metric: Metric) -> pd.DataFrame:
    frame = trajectories.curves(part, metric.name)
    return trajectories.smoothed(frame) if metric.every_step else frame


def noise(results: Results, configuration: str, metrics: Sequence[Metric]) -> dict[Metric, pd.DataFrame]:
    """Curves of BF16 and of BF16 once more, which differ by rounding alone."""
    part = chosen(results, PARTITIONS.sweep, configuration)
    if isinstance(part, NotRun) or not part.has(AGAIN):
        return {}
    return {metric: recorded(part, metric) for metric in metrics}


def _levels(axes: Axes, frame: pd.DataFrame, of: Comparison, metric: Metric, *, label_x: bool) -> None:
    axes.set_title(f"{metric.title}, {metric.unit}")
    if (trunk := trajectories.level(frame, TRUNK)) is not None:
        axes.plot(trunk.tokens, trunk.mean, color=plots.theme().quiet, marker="o" if trunk.few else "", markersize=2)
        axes.axvline(trunk.tokens[-1], color=plots.theme().quiet, linewidth=0.7)
    found = [(arm, trajectories.level(frame, arm)) for arm in of.arms]
    for arm, series in found:
        if series is not None:
            _draw(axes, ARMS[arm].look, series)
    if not any(series for _, series in found):
        plots.instead(axes, "no data")
    plots.tokens_axis(axes, label_x)


def changes(
    axes: Axes, frame: pd.DataFrame, again: pd.DataFrame | None, of: Comparison, metric: Metric, *, label_x: bool
) -> None:
    """From BF16; with what BF16 differs from itself by, and where the paper's arms ended."""
    axes.set_title("Change from BF16, %")
    itself = None if again is None else trajectories.change(again, AGAIN, BF16)
    if itself is not None:
        _draw(axes, NOISE, itself)
    found = {arm: trajectories.change(frame, arm, BF16) for arm in of.arms if arm != BF16}
    ends = [series.tokens for series in found.values() if series is not None]
    for arm, series in found.items():
        if series is not None:
            _draw(axes, ARMS[arm].look, series)
    if not ends:
        plots.instead(axes, "no pair of trials")
        return
    axes.axhline(0, color=plots.theme().text, linewidth=1)
    axes.yaxis.set_major_formatter(plots.percent(signed=True))
    axes.locator_params(axis="y", nbins=5)
    plots.tokens_axis(axes, label_x)
    if metric.in_paper:
        _paper_marks(axes, of, metric)


def _paper_marks(axes: Axes, of: Comparison, metric: Metric) -> None:
    """Right of the panel, beside each other."""
    for i, arm in enumerate(arm for arm in of.arms if arm != BF16):
        value, look, beside = of.paper_change(metric.name, arm), ARMS[arm].look, axes.get_yaxis_transform()
        if value is not None:
            axes.plot(
                [1.03 + 0.045 * i], [value], look.marker, mfc="none", mec=look.shade, transform=beside, clip_on=False
            )


def _draw(axes: Axes, look: Look, series: Series) -> None:
    plots.curve(axes, look, series.tokens, series.mean, series.band, points=series.few)


# -------------------------------------------------------------------------------- details


def key(label: str, look: Look) -> Line2D:
    return Line2D([], [], color=look.shade, dashes=look.dashes or (None, None), marker=look.marker, label=label)


def shown_of(frame: pd.DataFrame, of: Comparison) -> list[str]:
    there = set(frame["arm"])
    return [arm for arm in of.arms if arm in there]


def lacking(shown: Sequence[str], of: Comparison) -> tuple[str, ...]:
    missing = [ARMS[arm].label for arm in of.arms if arm not in shown]
    return (f"No data of {', '.join(missing)}.",) if missing else ()


def ids(frame: pd.DataFrame, of: Comparison) -> tuple[str, ...]:
    return tuple(dict.fromkeys(frame.loc[frame["arm"].isin((*of.arms, TRUNK)), "id"]))


def _trials(frames: dict[Metric, pd.DataFrame], of: Comparison) -> tuple[str, ...]:
    return tuple(dict.fromkeys(i for frame in frames.values() for i in ids(frame, of)))
