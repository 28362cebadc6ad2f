"""Figure B: what falls back at which threshold, and what that changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fewbits.analysis import plots
from fewbits.analysis.frames import Results
from fewbits.analysis.mor.decisions import decisions, share
from fewbits.analysis.mor.looks import (
    BF16,
    scale,
)
from fewbits.analysis.paper import paper
from fewbits.analysis.plots import LOOKS
from fewbits.analysis.registry import figure
from fewbits.analysis.results import FigureResult, NotRun, Picture
from fewbits.analysis.statistics import ALPHA, summary
from fewbits.analysis.verdicts import Differences, NoData

AXIS = "recipe.threshold"
LOSS = "validation_loss"


@figure("mor", "Figure B", "Thresholds: what falls back, and what it changes")
def thresholds(results: Results) -> Picture:
    """Over the threshold: the share of decisions for BF16, and the change of validation loss."""
    lines = _lines(results)
    if not lines:
        return NotRun(scale(results))
    parts = {name: results.of_sweep(name) for name in {line.sweep for line in lines}}
    frames = {name: decisions(part) for name, part in parts.items()}
    shares = {line: _fallback_of(line, frames[line.sweep]) for line in lines}
    changes = {line: _changes_of(line, parts[line.sweep]) for line in lines}
    if not any(len(found) for found in (*shares.values(), *changes.values())):
        return NoData("no trial of a threshold has ended")

    def draw() -> Figure:
        picture, ((above,), (below,)) = plots.panels(2, 1, 4.4, sharex=True)
        for line, look in zip(lines, LOOKS, strict=False):
            for axes, found in ((above, shares[line]), (below, changes[line])):
                x = np.array([value for value in line.at if value in found])
                values = [summary(found[value], 1 - 2 * ALPHA) for value in x]
                mean = np.array([one.mean for one in values])
                axes.plot(x, mean, color=look.shade, dashes=look.dashes or (None, None), marker=look.marker)
                for value, one in zip(x, values, strict=True):
                    if one.interval is not None:
                        axes.plot([value, value], [one.interval.low, one.interval.high], color=look.shade, linewidth=1)
        below.axhline(0, color=plots.theme().text, linewidth=0.9)
        for axes in (above, below):
            axes.axvline(paper("mor").numbers["threshold"].value, color=plots.theme().quiet, linewidth=0.8)
            axes.xaxis.set_major_formatter(plots.percent())
        above.set_ylim(bottom=0)
        above.yaxis.set_major_formatter(plots.percent())
        below.yaxis.set_major_formatter(plots.percent(signed=True))
        above.set_title("Decisions for BF16, %")
        below.set_title("Validation loss, change from BF16, %")
        below.set_xlabel("threshold of the relative error, %")
        mark = Line2D([], [], color=plots.theme().quiet, linewidth=0.8, label="the paper's, 4.5 %")
        plots.legend(picture, [(line.label, look) for line, look in zip(lines, LOOKS, strict=False)], extra=[mark])
        return picture

    notes: tuple[str, ...] = ("Means over seeds with 90 % intervals.",)
    if len(lines) > len(LOOKS):
        notes += (f"{len(lines) - len(LOOKS)} more lines are left out here.",)
    return FigureResult(draw, tuple(dict.fromkeys(i for line in lines for ids in line.at.values() for i in ids)), notes)


@dataclass(frozen=True)
class Line:
    """An arm over thresholds, the values of its other axes fixed; of each threshold its trials' ids."""

    sweep: str
    arm: str
    rest: tuple[tuple[str, str], ...]
    label: str
    at: Mapping[float, tuple[str, ...]]
    spelled: Mapping[float, str]

    def __hash__(self) -> int:
        return hash((self.sweep, self.arm, self.rest))


def _lines(results: Results) -> list[Line]:
    found: dict[tuple[str, str, tuple[tuple[str, str], ...]], dict[str, list[str]]] = {}
    for member in results.members:
        axes = dict(member.cell.axes)
        if AXIS in axes:
            threshold = axes.pop(AXIS)
            key = (member.cell.sweep, str(member.cell.arm), tuple(axes.items()))
            found.setdefault(key, {}).setdefault(threshold, []).append(member.id)
    varying = {axis for _, _, rest in found for axis, _ in rest if len({dict(r).get(axis) for _, _, r in found}) > 1}
    lines = []
    for (sweep, arm, rest), ids in found.items():
        label = ", ".join(value for axis, value in rest if axis in varying) or "128×128, GAM"
        spelled = dict(sorted((float(text), text) for text in ids))
        lines.append(Line(sweep, arm, rest, label, {x: tuple(ids[text]) for x, text in spelled.items()}, spelled))
    return lines


def _fallback_of(line: Line, frame: pd.DataFrame) -> dict[float, list[float]]:
    values = share(frame, ["id"]).set_index("id")["value"] if len(frame) else pd.Series(dtype=float)
    found = {x: [float(values[i]) for i in ids if i in values.index] for x, ids in line.at.items()}
    return {x: numbers for x, numbers in found.items() if numbers}


def _changes_of(line: Line, part: Results) -> dict[float, list[float]]:
    found = {}
    for x, text in line.spelled.items():
        pairs = part.paired(LOSS, line.arm, BF16, where={**dict(line.rest), AXIS: text}) if part.has(BF16) else None
        if isinstance(pairs, Differences) and pairs.values:
            found[x] = list(pairs.values)
    return found
