"""Figures in place of task scores: arms on text of another kind, with the paper's last scores beside.

Task scores need models of billions of parameters. What ours can show is whether an arm that fits its own text as well
as the baseline does so on other text too, which is what a divergence of loss and downstream scores is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fewbits.analysis import plots, trajectories
from fewbits.analysis.curves import Arm, Metric, Shown, changes, lacking, measured, noise_key
from fewbits.analysis.engine.data import Differences, NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.statistics import ALPHA, summary
from fewbits.analysis.results import FigureResult, NotRun, Picture

ELSEWHERE = Metric("ood_loss", "Out-of-domain loss", "nats")
CLOZE = ("ood_cloze.accuracy", "validation_cloze.accuracy")


@dataclass(frozen=True)
class Row:
    """Of panels: arms of ours, and the paper's last scores of them, as parts of 1."""

    part: Results | NotRun
    of: Shown
    scores: Mapping[str, float]
    again: Results | None = None  # where A/A is run


def elsewhere(rows: Mapping[str, Row], score: str) -> Picture:
    """Of each row: loss on other text as a change from the baseline, our cloze task, the paper's last score."""
    run = {name: (row, row.part) for name, row in rows.items() if isinstance(row.part, Results)}
    if not run:
        return next(row.part for row in rows.values() if isinstance(row.part, NotRun))
    found = {name: measured(part, row.of, ELSEWHERE, row.again) for name, (row, part) in run.items()}
    there = {arm for one in found.values() for arm in one.levels} - {t for row in rows.values() for t in row.of.trunks}
    if not there:
        return NoData(f"no curve of {ELSEWHERE.title.lower()}")
    cloze = {name: _cloze(part, row.of) for name, (row, part) in run.items()}

    def draw() -> Figure:
        columns = 3 if any(cloze.values()) else 2
        picture, grid = plots.panels(len(rows), columns, 0.5 + 1.75 * len(rows))
        scored: list[Mapping[str, float]] = []
        for axes, (name, row) in zip(grid, rows.items(), strict=True):
            if name in found:
                changes(axes[0], found[name], row.of, ELSEWHERE, label_x=True)
            else:
                plots.instead(axes[0], str(row.part))
            axes[0].set_title(
                "Other text, %" if columns == 3 else f"Out-of-domain loss, from {row.of.baseline.label}, %"
            )
            axes[0].set_ylabel(name)
            if columns == 3:
                _dots(axes[1], row.of.arms, cloze.get(name, {}), "Cloze, %", hollow=False)
            scores = {arm: (value,) for arm, value in row.scores.items()}
            title = f"{score}, the paper's, %" if columns == 2 else f"{score}, paper"
            if row.scores in scored:  # the same numbers as of the row above
                axes[-1].set_axis_off()
            else:
                _dots(axes[-1], row.of.arms, scores, title, hollow=True)
            scored.append(row.scores)
            if columns == 3:  # the arms' names stand left of the panel beside it
                axes[-1].tick_params(labelleft=False)
                axes[0].locator_params(axis="x", nbins=2)
        shown = {arm.name: arm for row in rows.values() for arm in row.of.arms if arm.name in there}
        extra = [*noise_key(found.values()), plots.hollow("the paper's")]
        plots.legend(picture, [(arm.label, arm.look) for arm in shown.values()], extra=extra)
        return picture

    notes: tuple[str, ...] = (
        f"{score} needs models of billions of parameters: the loss on text of another kind stands in its place.",
    )
    for row, part in run.values():
        notes += trajectories.diverged(part, row.of.names) + lacking(there, row.of)
    trials = tuple(dict.fromkeys(trial for one in found.values() for trial in one.trials))
    return FigureResult(draw, trials, tuple(dict.fromkeys(notes)))


def _cloze(part: Results, of: Shown) -> dict[str, tuple[float, ...]]:
    """Last accuracies of our four-way cloze task, seed by seed, where it was asked for."""
    metric = next((name for name in CLOZE if name in part.metrics()), None)
    found = {} if metric is None else {arm: part.sample(metric, arm) for arm in of.names if part.has(arm)}
    return {arm: sample.values for arm, sample in found.items() if isinstance(sample, Differences)}


def _dots(
    axes: Axes, arms: Sequence[Arm], values: Mapping[str, tuple[float, ...]], title: str, *, hollow: bool
) -> None:
    """A number for each arm, with its interval where it has several seeds; hollow: the paper's."""
    axes.set_title(title)
    for y, arm in enumerate(arms):
        if arm.name in values:
            look, found = arm.look, summary(values[arm.name], 1 - 2 * ALPHA)
            if found.interval is not None:
                axes.plot([found.interval.low, found.interval.high], [y, y], color=look.shade)
            axes.plot([found.mean], [y], look.marker, mfc="none" if hollow else look.shade, mec=look.shade, ms=6)
    axes.set_yticks(range(len(arms)), [arm.label for arm in arms])
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(plots.percent())
