"""Figures 7, 9 and 21: arms on text of another kind, in place of MMLU, with the paper's last MMLU beside.

MMLU needs models of billions of parameters. What ours can show is whether an arm that fits its own text as well as BF16
does so on other text too, which is what the paper's divergence of loss and downstream scores is about.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fewbits.analysis import plots
from fewbits.analysis.frames import Results
from fewbits.analysis.mor import trajectories
from fewbits.analysis.mor.curves import Metric, changes, lacking, measured, noise_key
from fewbits.analysis.mor.looks import (
    ABLATIONS,
    ARMS,
    BF16,
    PARTITIONS,
    PARTITIONS_2,
    SUB_TENSOR,
    TRUNK,
    Comparison,
    chosen,
)
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture
from fewbits.analysis.statistics import ALPHA, summary
from fewbits.analysis.verdicts import Differences, NoData

ELSEWHERE = Metric("ood_loss", "Out-of-domain loss", "nats")
CLOZE = ("ood_cloze.accuracy", "validation_cloze.accuracy")


@figure("mor", "Figure 7")
def figure_7(results: Results) -> Picture:
    return elsewhere(results, {"configuration 1": PARTITIONS, "configuration 2": PARTITIONS_2})


@figure("mor", "Figure 9")
def figure_9(results: Results) -> Picture:
    sizes = Comparison(ABLATIONS.sweep, ABLATIONS.table, (BF16, "block", "block-64", "threshold-5"))
    scalings = Comparison(ABLATIONS.sweep, ABLATIONS.table, (BF16, "block", "amax", "e8m0"))
    return elsewhere(results, {"block size, threshold": sizes, "scaling": scalings})


@figure("mor", "Figure 21")
def figure_21(results: Results) -> Picture:
    return elsewhere(results, {"sub-tensor": SUB_TENSOR})


def elsewhere(results: Results, comparisons: dict[str, Comparison]) -> Picture:
    """A row for each comparison: loss on other text as a change from BF16, our cloze task, the paper's last MMLU."""
    parts = {name: chosen(results, of.sweep, of.configuration) for name, of in comparisons.items()}
    if all(isinstance(part, NotRun) for part in parts.values()):
        return next(part for part in parts.values() if isinstance(part, NotRun))
    run = {name: part for name, part in parts.items() if isinstance(part, Results)}
    found = {name: measured(results, part, comparisons[name], ELSEWHERE) for name, part in run.items()}
    there = {arm for one in found.values() for arm in one.levels} - {TRUNK}
    if not there:
        return NoData(f"no curve of {ELSEWHERE.title.lower()}")
    cloze = {name: _cloze(part, comparisons[name]) for name, part in run.items()}

    def draw() -> Figure:
        columns = 3 if any(cloze.values()) else 2
        picture, grid = plots.panels(len(comparisons), columns, 0.5 + 1.75 * len(comparisons))
        for row, (name, of) in zip(grid, comparisons.items(), strict=True):
            if name in found:
                changes(row[0], found[name], of, ELSEWHERE, label_x=True)
            else:
                plots.instead(row[0], str(parts[name]))
            row[0].set_title("Other text, %" if columns == 3 else "Out-of-domain loss, change, %")
            row[0].set_ylabel(name)
            if columns == 3:
                _dots(row[1], of, cloze.get(name, {}), "Cloze, %", hollow=False)
            mmlu = {arm: (value / 100,) for arm in of.arms if (value := of.paper("mmlu", arm)) is not None}
            _dots(row[-1], of, mmlu, "MMLU, the paper's, %" if columns == 2 else "MMLU, paper", hollow=True)
            if columns == 3:  # the arms' names stand left of the panel beside it
                row[-1].tick_params(labelleft=False)
                row[0].locator_params(axis="x", nbins=2)
        shown = dict.fromkeys(arm for of in comparisons.values() for arm in of.arms if arm in there)
        extra = [*noise_key(found.values()), plots.hollow("the paper's")]
        plots.legend(picture, [(ARMS[a].label, ARMS[a].look) for a in shown], extra=extra)
        return picture

    notes: tuple[str, ...] = (
        "MMLU needs models of billions of parameters: the loss on text of another kind stands in its place.",
    )
    for name, part in run.items():
        of = comparisons[name]
        notes += trajectories.diverged(part, of.arms) + lacking(there, of)
    trials = tuple(dict.fromkeys(trial for one in found.values() for trial in one.trials))
    return FigureResult(draw, trials, tuple(dict.fromkeys(notes)))


def _cloze(part: Results, of: Comparison) -> dict[str, tuple[float, ...]]:
    """Last accuracies of our four-way cloze task, seed by seed, where it was asked for."""
    metric = next((name for name in CLOZE if name in part.metrics()), None)
    found = {} if metric is None else {arm: part.sample(metric, arm) for arm in of.arms if part.has(arm)}
    return {arm: sample.values for arm, sample in found.items() if isinstance(sample, Differences)}


def _dots(axes: Axes, of: Comparison, values: Mapping[str, tuple[float, ...]], title: str, *, hollow: bool) -> None:
    """A number for each arm, with its interval where it has several seeds; hollow: the paper's."""
    axes.set_title(title)
    for y, arm in enumerate(of.arms):
        if arm in values:
            look, found = ARMS[arm].look, summary(values[arm], 1 - 2 * ALPHA)
            if found.interval is not None:
                axes.plot([found.interval.low, found.interval.high], [y, y], color=look.shade)
            axes.plot([found.mean], [y], look.marker, mfc="none" if hollow else look.shade, mec=look.shade, ms=6)
    axes.set_yticks(range(len(of.arms)), [ARMS[arm].label for arm in of.arms])
    axes.set_ylim(len(of.arms) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(plots.percent())
