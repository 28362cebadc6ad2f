"""Curves of losses as every study's figures show them: arms as they are, and their changes from a baseline.

Arms differ by a tenth of a percent, so beside the curves themselves stand their changes, seed by seed. The paper's last
numbers, where it prints them, are hollow marks at the right edge: of a model and a training far larger than ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fewbits.analysis import plots, trajectories
from fewbits.analysis.arms import AGAIN, BASELINE, TRUNK
from fewbits.analysis.engine.data import NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.plots import Array, Look
from fewbits.analysis.results import FigureResult, Picture
from fewbits.analysis.trajectories import Series

HEIGHT = 1.62  # inches of a row
FARTHEST = 4.0  # times: how much higher the paper's numbers may make a panel
LEAST = 1e-5  # half of the smallest range that a panel of changes shows
NOISE = Look(None, (1, 1.6), "x")


@dataclass(frozen=True)
class Metric:
    name: str
    title: str
    unit: str
    every_step: bool = False  # so that it is averaged over steps to be legible
    in_paper: bool = False
    of_micro_batches: bool = False  # so that A/A, whose micro-batches have another size, has another one


LOSS = Metric("loss", "Training loss", "nats", every_step=True, in_paper=True)
VALIDATION = Metric("validation_loss", "Validation loss", "nats", in_paper=True)
NORM = Metric("parameter_norm", "Parameter norm", "L2")


@dataclass(frozen=True)
class Arm:
    """An arm as figures show it."""

    name: str
    label: str
    look: Look


def _unsaid(metric: str, arm: str) -> float | None:
    return None


@dataclass(frozen=True)
class Shown:
    """What a figure of curves shows."""

    arms: tuple[Arm, ...]  # the baseline among them, or not
    baseline: Arm
    trunks: Mapping[str, str] = field(default_factory=lambda: {TRUNK: "trunk, BF16"})  # names, with their labels
    said: Callable[[str, str], float | None] = _unsaid  # the paper's last change of a metric, of an arm
    noise: bool = True  # A/A is shown; it has BF16's optimizer and rate, which arms may not have

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(arm.name for arm in self.arms)

    @property
    def others(self) -> tuple[Arm, ...]:
        """That are compared with the baseline."""
        return tuple(arm for arm in self.arms if arm.name != self.baseline.name)


@dataclass(frozen=True)
class Measured:
    """What one row of panels shows of one metric."""

    levels: dict[str, Series]  # of arms, those there are; the trunk's among them
    changes: dict[str, Series]  # from the baseline; A/A's from BF16 and other trunks' from the first among them
    trials: tuple[str, ...]


def measured(part: Results, of: Shown, metric: Metric, again: Results | None = None) -> Measured:
    """part: the figure's own places. again: where A/A is run, if not there too."""
    frame = _recorded(part, metric)
    levels = {name: trajectories.level(frame, name) for name in (*of.names, *of.trunks)}
    changes = {arm.name: trajectories.change(frame, arm.name, of.baseline.name) for arm in of.others}
    trunks = list(of.trunks)
    for name in trunks[1:]:
        if part.has(name):
            exact = trajectories.curves(part, metric.name)
            changes[name] = trajectories.thinned(trajectories.change(exact, name, trunks[0]))
    noise = part if again is None else again
    if of.noise and noise.has(AGAIN) and not metric.of_micro_batches:
        changes[AGAIN] = trajectories.change(_recorded(noise, metric), AGAIN, BASELINE)
    trials = (one.trials for one in (*levels.values(), *changes.values()) if one is not None)
    return Measured(
        {arm: one for arm, one in levels.items() if one is not None},
        {arm: one for arm, one in changes.items() if one is not None},
        tuple(dict.fromkeys(trial for some in trials for trial in some)),
    )


def _recorded(part: Results, metric: Metric) -> pd.DataFrame:
    def made() -> pd.DataFrame:
        frame = trajectories.curves(part, metric.name)
        return trajectories.smoothed(frame, part) if metric.every_step else frame

    return part.remembered(f"curves {metric.name}", made)


@dataclass(frozen=True)
class Row:
    """Two panels: arms as they are, and their changes from the baseline."""

    part: Results  # the figure's own places
    of: Shown
    metric: Metric
    again: Results | None = None  # where A/A is run, if not there too
    name: str = ""  # said beside them, where a figure shows several parts
    marks: tuple[float, ...] = ()  # tokens at which something changes

    @cached_property
    def found(self) -> Measured:
        return measured(self.part, self.of, self.metric, self.again)

    @property
    def there(self) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.of.arms if arm.name in self.found.levels)


def training(rows: Sequence[Row]) -> Picture:
    """A figure of nothing but rows."""
    if not any(row.there for row in rows):
        labels = dict.fromkeys(arm.label for row in rows for arm in row.of.arms)
        return NoData(f"no curve of {', '.join(labels)}")

    def draw() -> Figure:
        alike = len({id(row.part) for row in rows}) == 1
        picture, grid = plots.panels(len(rows), 2, 0.45 + HEIGHT * len(rows), sharex="col" if alike else "none")
        fill(picture, grid, rows)
        return picture

    return FigureResult(draw, trials(rows), notes(rows))


def fill(picture: Figure, grid: Sequence[Sequence[Axes]], rows: Sequence[Row]) -> None:
    """Draw the rows, and above all of them their legend."""
    for (left, right), row in zip(grid, rows, strict=True):
        last = row is rows[-1] or not left.get_shared_x_axes().joined(left, grid[-1][0])
        levels(left, row.found, row.of, row.metric, label_x=last)
        changes(right, row.found, row.of, row.metric, label_x=last)
        left.set_ylabel(row.name)
        right.margins(x=0.08)  # room for what is drawn side by side at the end
        for tokens in row.marks:
            right.axvline(tokens, color=plots.theme().line, linewidth=1, dashes=(1.5, 1.5), zorder=1)
    looks = dict.fromkeys((arm.label, arm.look) for row in rows for arm in row.there)
    trunks = {name: row.of for row in rows for name in row.of.trunks if name in row.found.levels}
    said = any(row.metric.in_paper and row.of.said(row.metric.name, arm.name) for row in rows for arm in row.of.others)
    extra = [_trunk_line(of, name, [], []) for name, of in trunks.items()]
    extra += noise_key(row.found for row in rows)
    extra += [plots.hollow("the paper's last")] if said else []
    plots.legend(picture, list(looks), extra=extra)


def trials(rows: Sequence[Row]) -> tuple[str, ...]:
    """Behind all of them."""
    return tuple(dict.fromkeys(trial for row in rows for trial in row.found.trials))


def notes(rows: Sequence[Row]) -> tuple[str, ...]:
    """What panels do not say themselves."""
    shown = set(trials(rows))
    seeds = {member.cell.seed for row in rows for member in row.part.members if member.id in shown}
    if len(seeds) == 1:
        panels = "One seed, so there is neither a range nor an interval. Right: its paired changes."
    else:
        panels = (
            "Left: mean and range of seeds. Right: mean of the seeds' paired changes and its 90 % interval, by these "
            "pairs alone."
        )
    said = [f"{panels} What ends at one step is drawn side by side."]
    if any(row.metric.every_step for row in rows):
        said.append(f"The training loss is averaged over steps to {trajectories.POINTS} points of each curve.")
    if any(row.metric.in_paper and row.of.said(row.metric.name, arm.name) for row in rows for arm in row.of.others):
        said.append("The paper's last numbers are hollow marks at the right; arrows where they are far beyond ours.")
    for row in rows:
        there = {arm.name for other in rows if other.part is row.part for arm in other.there}
        beside = f"{row.name}: " if row.name else ""
        gone = (*trajectories.diverged(row.part, row.of.names), *lacking(there, row.of))
        said += [beside + words for words in gone]
    return tuple(dict.fromkeys(said))


def levels(axes: Axes, found: Measured, of: Shown, metric: Metric, *, label_x: bool) -> None:
    """As they are, from the trunk's last part on: it may be many times as long as what branches from it."""
    axes.set_title(f"{metric.title}, {metric.unit}")
    _trunks(axes, of, found.levels)
    for arm in of.arms:
        _draw(axes, arm.look, found.levels.get(arm.name), metric)
    trunks = [one for name, one in found.levels.items() if name in of.trunks]
    if trunks:
        axes.axvline(max(one.tokens[-1] for one in trunks), color=plots.theme().quiet, linewidth=0.7)
    _near(axes, trunks, list(found.levels.values()))
    if not found.levels:
        plots.instead(axes, "no data")
    plots.tokens_axis(axes, label_x)


def changes(axes: Axes, found: Measured, of: Shown, metric: Metric, *, label_x: bool) -> None:
    """From the baseline; with what BF16 differs from itself by, and where the paper's arms ended."""
    axes.set_title(f"Change from {of.baseline.label}, %")
    _trunks(axes, of, found.changes)
    _draw(axes, NOISE, found.changes.get(AGAIN), metric)
    for arm in of.arms:
        _draw(axes, arm.look, found.changes.get(arm.name), metric)
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


def lacking(there: Collection[str], of: Shown) -> tuple[str, ...]:
    missing = [arm.label for arm in of.arms if arm.name not in there]
    return (f"No data of {', '.join(missing)}.",) if missing else ()


def _paper_marks(axes: Axes, of: Shown, metric: Metric) -> None:
    """Right of the panel, beside each other; an arrow for what would make it more than FARTHEST times as high."""
    low, high = axes.get_ylim()
    room, beside = (FARTHEST - 1) * (high - low), axes.get_yaxis_transform()
    marks = {i: of.said(metric.name, arm.name) for i, arm in enumerate(of.others)}
    values = [value for value in marks.values() if value is not None and high - room < value < low + room]
    axes.set_ylim(min([low, *(1.05 * value for value in values)]), max([high, *(1.05 * value for value in values)]))
    for i, value in marks.items():
        if value is None:
            continue
        place, look = 1.03 + 0.045 * i, of.others[i].look
        marker, y = look.marker, value
        if value not in values:
            marker, y = (r"$\uparrow$", axes.get_ylim()[1]) if value > 0 else (r"$\downarrow$", axes.get_ylim()[0])
        axes.plot([place], [y], marker=marker, mfc="none", mec=look.shade, transform=beside, clip_on=False)


def _near(axes: Axes, trunks: Sequence[Series], every: Sequence[Series]) -> None:
    """Leave out what lies further before the branches than three times their length."""
    if not trunks:
        return
    start, last = (max(one.tokens[-1] for one in some) for some in (trunks, every))
    left = start - 3 * (last - start)
    if left > min(one.tokens[0] for one in trunks) and start < last:
        edges = ((one.tokens, edge) for one in every for edge in (one.mean, *(one.band or ())))
        seen = np.concatenate([values[tokens >= left] for tokens, values in edges])
        room = 0.06 * float(np.ptp(seen)) or LEAST
        axes.set(xlim=(left, last + 0.08 * (last - left)), ylim=(seen.min() - room, seen.max() + room))


def _trunks(axes: Axes, of: Shown, lines: Mapping[str, Series]) -> None:
    for name in of.trunks:
        if (trunk := lines.get(name)) is not None:
            axes.add_line(_trunk_line(of, name, trunk.tokens, trunk.mean, marker="o" if trunk.few else ""))
            axes.autoscale_view()


def _trunk_line(of: Shown, name: str, x: Array | list[float], y: Array | list[float], marker: str = "") -> Line2D:
    dashes: Any = (None, None) if name == next(iter(of.trunks)) else (4, 2)
    return Line2D(x, y, color=plots.theme().quiet, dashes=dashes, marker=marker, markersize=2, label=of.trunks[name])


def _draw(axes: Axes, look: Look, series: Series | None, metric: Metric) -> None:
    if series is not None:
        apart = not metric.every_step  # else points follow each other too closely
        plots.curve(axes, look, series.tokens, series.mean, series.band, points=series.few, apart=apart)
