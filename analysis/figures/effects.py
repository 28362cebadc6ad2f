"""The figure of effects: each arm's relative change of validation loss from its baseline, in percent, as a row.

A number that the paper reports is a hollow mark in the row of our number; margins of claims and the interval of the A/A
comparison span all rows. If a number is beyond the axis, an arrow (ours) or a triangle (the paper's) stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from fewbits.analysis.engine.claims.schema import load_claims
from fewbits.analysis.engine.results.data import Data, Differences, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.engine.results.places import (
    AGAIN,
    ArmTable,
    Group,
    arm_table,
    not_planned,
    sweep_places,
    trial_ids,
)
from fewbits.analysis.engine.statistics import ALPHA, Interval, estimate
from fewbits.analysis.figures.panels import legend, panels, paper_key, percent, rows_of_labels, rule_key
from fewbits.analysis.figures.theme import SMALL, theme
from fewbits.analysis.report.items import FigureResult, Picture
from fewbits.analysis.tables.cells import compare

LOSS = "validation_loss"
NONE = NoData("no data")
FAR = 4.0  # the axis does not extend to effects greater than FAR times the median effect, such as a control's
DOTTED = (2, 2)


@dataclass(frozen=True)
class Estimate:
    """A row of the figure: our number with its interval, and the number that the study's paper reports for it."""

    label: str
    mean: float | None  # ours; None if it is missing, and then `text` gives the reason
    interval: Interval | None = None
    paper: float | None = None
    text: str = ""  # shown to the right of the panel
    group: str = ""  # a line separates rows of different groups
    arm: str = ""
    data: Data = NONE  # the change for each seed, or the reason why there are no data


@dataclass(frozen=True)
class EffectsFigure:
    id: str
    title: str = "Effects of all arms, and the noise"
    margins: tuple[str, ...] = ()  # the ids of the claims whose margins are drawn
    # SWEEP/ARM → the key, in `numbers` of studies/STUDY/paper.yaml, of the paper's number for the arm's change.
    paper: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()


def effects_of(results: Results, study: str, of: EffectsFigure) -> list[Estimate]:
    """Return the effects of arms, not trunks, that end with their baseline; equal trials count in the first group."""
    table, found = arm_table(study), []
    seen: set[tuple[str, ...]] = set()
    for group in of.groups or table.groups:
        part = sweep_places(results, group.sweep, group.where)
        if isinstance(part, NotPlanned):
            continue
        for name in dict.fromkeys(str(member.cell.arm) for member in part.members):
            arm, trials = table.arm(name), tuple(m.id for m in part.members if m.cell.arm == name)
            comparable = part.has(arm.baseline) and name != arm.baseline and name not in table.trunks
            if not comparable or trials in seen or _ends(part, name) != _ends(part, arm.baseline):
                continue
            seen.add(trials)
            data = compare(results, LOSS, name, arm.baseline, group.where, group.sweep)
            if not isinstance(data, NotPlanned):
                printed = _paper_change(table, of, group, name)
                found.append(_estimate(group.prefix + arm.short, name, group.sweep + group.prefix, data, printed))
    return found


def _estimate(label: str, arm: str, group: str, data: Data, paper: float | None) -> Estimate:
    if not isinstance(data, Differences) or not data.values:
        diverged = isinstance(data, Differences) and data.diverged
        return Estimate(label, None, None, paper, f"{diverged} diverged" if diverged else "no data", group, arm, data)
    found, mean = estimate(data.values, data.shared), float(np.mean(data.values))
    text = f"{100 * mean:+.3f} %".replace("-", "−").replace("−0.000", "0.000").replace("+0.000", "0.000")
    text += f" · n = {len(data.values)}" + (f", {data.diverged} ✗" if data.diverged else "")
    interval = None if found is None else found.interval(1 - 2 * ALPHA)
    return Estimate(label, mean, interval, paper, text, group, arm, data)


def effects_picture(results: Results, study: str, of: EffectsFigure) -> Picture:
    """Return the figure of effects, with a row for each arm that `effects_of` returns, or why there is none."""
    rows = effects_of(results, study, of)
    if not rows:
        return not_planned(results)
    if all(row.mean is None for row in rows):
        return NoData("no pair of trials of an arm and its baseline is finished")
    noise = next((row.interval for row in rows if row.arm == AGAIN), None)
    margins = sorted({_margin(study, claim) for claim in of.margins} - {0.0})
    reach = 1.15 * max([*margins[: len(margins) // 2 + 1], *_usual(rows)])
    shown = [margin for margin in margins if margin <= reach]

    def draw() -> Figure:
        return draw_effects(rows, shown, noise, "change of validation loss from the arm's baseline, %", reach)

    reasons = (one.data.reason if isinstance(one.data, NoData) else "" for one in rows)
    notes = (
        "Each arm minus its baseline of the same seed at the end of training, relative to the baseline; the paper has "
        "one run of each arm. Arrows (ours) and triangles (the paper's) at an edge stand for numbers beyond it.",
        *of.notes,
        *dict.fromkeys(filter(None, reasons)),
        *dict.fromkeys(note for one in rows if isinstance(one.data, Differences) for note in one.data.notes),
    )
    return FigureResult(draw, tuple(dict.fromkeys(i for one in rows for i in one.data.trials)), notes)


def _ends(part: Results, arm: str) -> set[int]:
    """Return the numbers of steps after which an arm's trials end, counted from the start of their trunk."""
    trials = trial_ids(part, arm).values()
    return {part.starts[trial] + part.plan.trials[trial].trial.training.steps for trial in trials}


def _paper_change(table: ArmTable, of: EffectsFigure, group: Group, arm: str) -> float | None:
    """Return the paper's change of an arm's validation loss, as a fraction: named in `of.paper`, or from its tables."""
    if (key := f"{group.sweep}/{arm}") in of.paper:
        return paper(table.study).numbers[of.paper[key]].value
    if group.where and not table.place(group.where):  # a model or setting that the paper does not have
        return None
    for name in table.columns:
        printed, column = paper(table.study).table(name), table.column(name, arm, table.place(group.where))
        if column in {one.id for one in printed.columns}:
            return printed.change(LOSS, column)
    return None


def _margin(study: str, claim: str) -> float:
    found = load_claims(study).claim(claim)
    known = (found.margin_of(part) for part in found.parts)
    return min((margin.value for margin in known if margin is not None and margin.value), default=0.0)


def _usual(rows: Sequence[Estimate]) -> list[float]:
    """Return what the axis has to include: effects up to FAR times their median, and ends of their intervals."""
    sizes = [abs(row.mean) for row in rows if row.mean is not None]
    most = FAR * float(np.median(sizes))
    intervals = [row.interval for row in rows if row.interval and row.mean is not None and abs(row.mean) <= most]
    ends = [max(abs(interval.low), abs(interval.high)) for interval in intervals]
    return [size for size in sizes if size <= most] + [end for end in ends if end <= 2 * most]


def draw_effects(
    rows: Sequence[Estimate], margins: Sequence[float], noise: Interval | None, label: str, reach: float
) -> Figure:
    """Draw relative changes with intervals on an axis from -reach to reach; margins and noise span all rows."""
    figure, ((axes,),) = panels(1, 1, 1.15 + 0.21 * len(rows))
    axes.set(xlim=(-reach, reach), ylim=(len(rows) - 0.4, -0.6))
    for value in (*margins, *(-margin for margin in margins)):
        axes.axvline(value, color=theme().quiet, linewidth=0.8, dashes=DOTTED, zorder=1)
    axes.axvline(0, color=theme().text, linewidth=0.9, zorder=1)
    if noise is not None:
        axes.axvspan(noise.low, noise.high, color=theme().quiet, alpha=0.25, linewidth=0)
    for y, row in enumerate(rows):
        axes.text(1.02, y, row.text, transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL)
        _draw_estimate(axes, y, row, reach)
        if y and row.group != rows[y - 1].group:
            axes.axhline(y - 0.5, color=theme().grid, linewidth=0.8)
    rows_of_labels(axes, [row.label for row in rows])
    axes.xaxis.set_major_formatter(percent(signed=True))
    axes.set_xlabel(label)
    legend(figure, _keys(rows, margins, noise), columns=2)
    return figure


def _draw_estimate(axes: Axes, y: float, row: Estimate, reach: float) -> None:
    """Draw one row at height y: our mark is filled, the paper's is hollow; beyond `reach`, a mark at the edge."""
    if row.paper is not None:
        marker = ("<" if row.paper < 0 else ">") if abs(row.paper) > reach else "o"
        x = np.clip(row.paper, -0.97 * reach, 0.97 * reach)
        axes.plot([x], [y], marker, mfc="none", mec=theme().quiet, ms=6, zorder=2)
    if row.mean is None:
        return
    if abs(row.mean) > reach:
        arrow = {"arrowstyle": "-|>", "color": theme().line, "linewidth": 1.2}
        axes.annotate("", (np.sign(row.mean) * reach, y), (np.sign(row.mean) * 0.9 * reach, y), arrowprops=arrow)
        return
    if row.interval is not None:
        low, high = max(row.interval.low, -reach), min(row.interval.high, reach)
        axes.plot([low, high], [y, y], color=theme().text, linewidth=1.4)
    axes.plot([row.mean], [y], "o", color=theme().text, ms=4.5, zorder=3)


def _keys(rows: Sequence[Estimate], margins: Sequence[float], noise: Interval | None) -> list[Artist]:
    ours = "mean, 90 % interval" if any(row.interval for row in rows) else "ours, one seed"
    found: list[Artist] = [Line2D([], [], color=theme().text, marker="o", label=ours)]
    found += [paper_key()] if any(row.paper is not None for row in rows) else []
    if noise is not None:
        found.append(Patch(facecolor=theme().quiet, alpha=0.25, label="A/A: BF16 again"))
    values = " and ".join(f"{100 * margin:g}" for margin in margins)
    return [*found, rule_key(f"margins, ± {values} %", DOTTED)] if margins else found
