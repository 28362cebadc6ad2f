"""Figure B: what falls back at which threshold, and what that changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fewbits.analysis import plots
from fewbits.analysis.arms import BASELINE
from fewbits.analysis.engine.data import Differences, NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.statistics import ALPHA, summary
from fewbits.analysis.mor.decisions import decisions, share
from fewbits.analysis.mor.looks import THRESHOLD
from fewbits.analysis.plots import LOOKS, Look
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture
from fewbits.kernels.quantizer import Mixture

AXIS = "recipe.threshold"
BLOCKS = ("128x128", "tensor", "channel")  # in the order of colours
SCALINGS = {"gam": "GAM", "amax": "FP32 amax", "e8m0": "E8M0"}  # in that of dashes and markers
LOSS = "validation_loss"


@figure("mor", "Figure B", "Thresholds: what falls back, and what it changes")
def thresholds(results: Results) -> Picture:
    """Over the threshold: the share of decisions for BF16, and the change of validation loss."""
    lines = _lines(results)
    if not lines:
        return NotRun(results.scale_name)
    parts = {name: results.of_sweep(name) for name in {line.sweep for line in lines}}
    frames = {name: decisions(part) for name, part in parts.items()}
    shares = {line: _fallback_of(line, frames[line.sweep]) for line in lines}
    changes = {line: _changes_of(line, parts[line.sweep]) for line in lines}
    if not any(len(found) for found in (*shares.values(), *changes.values())):
        return NoData("no trial of a threshold has ended")

    models = list(dict.fromkeys(line.model for line in lines))

    def draw() -> Figure:
        picture, (above, below) = plots.panels(2, len(models), 4.4, sharex=True, sharey="row")
        for line in lines:
            column = models.index(line.model)
            _line(above[column], line, shares[line])
            _line(below[column], line, changes[line])
        for i, model in enumerate(models):
            below[i].axhline(0, color=plots.theme().text, linewidth=0.9)
            for axes in (above[i], below[i]):
                axes.axvline(THRESHOLD, color=plots.theme().quiet, linewidth=0.8)
                axes.xaxis.set_major_formatter(plots.percent())
            above[i].set_title(model)
            below[i].set_xlabel("threshold, %")
        above[0].set_ylim(bottom=0)
        above[0].set_ylabel("decisions for BF16, %")
        below[0].set_ylabel("validation loss,\nchange from BF16, %")
        above[0].yaxis.set_major_formatter(plots.percent())
        below[0].yaxis.set_major_formatter(plots.percent(signed=True))
        entries = {line.label: line.look for line in lines}
        mark = Line2D([], [], color=plots.theme().quiet, linewidth=0.8, label="the paper's, 4.5 %")
        plots.legend(picture, list(entries.items()), extra=[mark])
        return picture

    trials = tuple(dict.fromkeys(i for line in lines for ids in line.at.values() for i in ids))
    return FigureResult(draw, trials, ("Means over seeds with 90 % intervals. Colour: block; dashes: scaling.",))


@dataclass(frozen=True)
class Line:
    """An arm over thresholds, the values of its other axes fixed; of each threshold its trials' ids."""

    sweep: str
    arm: str
    rest: tuple[tuple[str, str], ...]
    model: str
    block: str
    scaling: str
    at: Mapping[float, tuple[str, ...]]
    spelled: Mapping[float, str]

    def __hash__(self) -> int:
        return hash((self.sweep, self.arm, self.rest))

    @property
    def label(self) -> str:
        return f"{self.block.replace('x', '×')}, {SCALINGS.get(self.scaling, self.scaling)}"

    @property
    def look(self) -> Look:
        colour = BLOCKS.index(self.block) if self.block in BLOCKS else len(BLOCKS)
        like = list(SCALINGS).index(self.scaling) if self.scaling in SCALINGS else len(SCALINGS)
        return replace(LOOKS[like], colour=colour)


def _line(axes: Axes, line: Line, found: Mapping[float, list[float]]) -> None:
    """The mean at each threshold, with an interval where there are seeds."""
    x = np.array([value for value in line.at if value in found])
    values = [summary(found[value], 1 - 2 * ALPHA) for value in x]
    intervals = [one.interval for one in values if one.interval is not None]
    band = None
    if len(intervals) == len(values) > 0:
        band = (np.array([i.low for i in intervals]), np.array([i.high for i in intervals]))
    if values:
        plots.curve(axes, line.look, x, np.array([one.mean for one in values]), band, points=True, apart=False)


def _lines(results: Results) -> list[Line]:
    found: dict[tuple[str, str, tuple[tuple[str, str], ...]], dict[str, list[str]]] = {}
    for member in results.members:
        axes = dict(member.cell.axes)
        if AXIS in axes:
            threshold = axes.pop(AXIS)
            key = (member.cell.sweep, str(member.cell.arm), tuple(axes.items()))
            found.setdefault(key, {}).setdefault(threshold, []).append(member.id)
    lines = []
    for (sweep, arm, rest), ids in found.items():
        spelled = dict(sorted((float(text), text) for text in ids))
        trial = results.plan.trials[ids[next(iter(ids))][0]].trial
        quantizer = Mixture.parse(trial.recipe.fprop.x).entries[0].quantizer
        block, scaling = str(quantizer.block), quantizer.scaling
        at = {x: tuple(ids[text]) for x, text in spelled.items()}
        lines.append(Line(sweep, arm, rest, trial.model.name, block, scaling, at, spelled))
    return lines


def _fallback_of(line: Line, frame: pd.DataFrame) -> dict[float, list[float]]:
    values = share(frame, ["id"]).set_index("id")["value"] if len(frame) else pd.Series(dtype=float)
    found = {x: [float(values[i]) for i in ids if i in values.index] for x, ids in line.at.items()}
    return {x: numbers for x, numbers in found.items() if numbers}


def _changes_of(line: Line, part: Results) -> dict[float, list[float]]:
    found = {}
    for x, text in line.spelled.items():
        pairs = (
            part.paired(LOSS, line.arm, BASELINE, where={**dict(line.rest), AXIS: text}) if part.has(BASELINE) else None
        )
        if isinstance(pairs, Differences) and pairs.values:
            found[x] = list(pairs.values)
    return found
