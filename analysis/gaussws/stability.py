"""Induced instability, ours: what becomes of a model that has learned when the learning rate is raised too far.

The paper's BF16 run diverges after 30 G tokens, which is out of reach. Here arms start from one trained checkpoint and
go on at 3, 10 and 30 times its rate (sweeps/config/gaussws/stability.yaml has the reasons). What is judged was fixed
before the first run: a trial *leaves its way* when its training loss, averaged over its last tenth, ends more than a
tenth above its trunk's, averaged likewise, or when it diverges: what "fails to recover" can mean of finite losses. Arms
are compared at the lowest rate at which most of BF16's trials leave theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fewbits.analysis import plots, trajectories
from fewbits.analysis.arms import BASELINE, compared, ids
from fewbits.analysis.curves import LOSS
from fewbits.analysis.engine.data import NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.multiplicity import more_events
from fewbits.analysis.engine.paper import Claim, Margin
from fewbits.analysis.engine.statistics import ALPHA
from fewbits.analysis.gaussws.arms import ARMS, DIFFQ, MINI, MINI_OURS, OURS, PARTS, TITLES, chosen
from fewbits.analysis.registry import claim, figure, table
from fewbits.analysis.results import (
    FigureResult,
    NotRun,
    Picture,
    Setting,
    Table,
    TableCell,
    TableResult,
    TableRow,
    Value,
)
from fewbits.analysis.verdicts import Outcome, Verdict, every, not_run, noted
from fewbits.sweeps.running.store import State

SWEEP, UNDER_MINI = "stability", "stability-mini"
RISE = 0.1
AXIS, RATES = "rate", ("x3", "x10", "x30")
SAID = f"a trial leaves its way when its loss ends more than {RISE:.0%} above its trunk's"
INDUCED = "Induced instability, ours and no test of the paper's horizon"


@dataclass(frozen=True)
class Ended:
    """Of an arm at one rate: how many seeds left their way, and their final losses over the trunk's."""

    left: int
    rises: tuple[float, ...]  # of those whose loss is finite
    trials: tuple[str, ...]

    @property
    def seeds(self) -> int:
        return len(self.trials)

    @property
    def words(self) -> str:
        return f"{self.left} of {self.seeds}"


def ended(part: Results, arm: str, rate: str) -> Ended | None:
    """None where the arm has no finished trial there."""
    late, states = part.late("loss"), dict(zip(part.trials["id"], part.trials["state"], strict=True))
    left = 0
    rises: list[float] = []
    trials: list[str] = []
    for key in ids(part, arm, {AXIS: rate}).values():
        parent = part.plan.trials[key].parent
        if states.get(key) == State.DIVERGED:
            left += 1
            trials.append(key)
        elif states.get(key) == State.DONE and parent in late and np.isfinite(late[key]):
            rise = late[key] / late[parent] - 1
            left += rise > RISE
            rises.append(rise)
            trials.append(key)
    return Ended(left, tuple(rises), tuple(trials)) if trials else None


def all_ended(results: Results) -> dict[tuple[str, str], Ended]:
    """By arm and rate, of both optimizers."""
    found = {}
    for sweep, arms in ((SWEEP, (BASELINE, OURS, DIFFQ, *PARTS)), (UNDER_MINI, (MINI, MINI_OURS))):
        part = chosen(results, sweep)
        if isinstance(part, Results):
            for arm in arms:
                for rate in RATES:
                    if part.has(arm, {AXIS: rate}) and (one := ended(part, arm, rate)) is not None:
                        found[arm, rate] = one
    return found


def beside(results: Results, *arms: str) -> tuple[str, ...]:
    """The protocol's result in words, for the notes of claims that are out of reach."""
    found = all_ended(results)
    words = []
    for arm in arms:
        counts = [f"{one.words} at {rate}" for (name, rate), one in found.items() if name == arm]
        if counts:
            words.append(f"{TITLES[arm]} {', '.join(counts)}")
    return (f"{INDUCED}: left their way {'; '.join(words)} ({SAID})",) if words else ()


# -------------------------------------------------------------------------------- table, figure and finding of our own


@table("gaussws", "Table A", "Induced instability: seeds that leave their way, and the rise of their loss")
def table_a(results: Results) -> Table:
    found = all_ended(results)
    if not found:
        there = isinstance(chosen(results, SWEEP), Results)
        return NoData("no trial of the sweep stability has ended") if there else NotRun(results.scale_name)
    rows = []
    for arm in dict.fromkeys(name for name, _ in found):
        cells = [found.get((arm, rate)) for rate in RATES]
        rows.append(TableRow(TITLES[arm], tuple(map(_count, cells)), "of seeds"))
        rows.append(TableRow("    loss over its trunk's", tuple(map(_rise, cells)), "%"))
    notes = (f"{SAID[0].upper()}{SAID[1:]}; rates are multiples of the trunk's, from its checkpoint on", INDUCED)
    return TableResult(RATES, tuple(rows), notes)


def _count(one: Ended | None) -> TableCell:
    return TableCell(Setting("", ()) if one is None else Setting(one.words, one.trials))


def _rise(one: Ended | None) -> TableCell:
    if one is None or not one.rises:
        return TableCell(Setting("" if one is None else "diverged", ()))
    return TableCell(Value(100 * float(np.mean(one.rises)), None, len(one.rises), one.trials))


@figure("gaussws", "Figure A", "Induced instability: training loss from the rise of the rate on")
def figure_a(results: Results) -> Picture:
    part = chosen(results, SWEEP)
    if isinstance(part, NotRun):
        return part
    panels = {rate: chosen(results, SWEEP, {AXIS: rate}) for rate in RATES}
    frames = {
        rate: trajectories.smoothed(trajectories.curves(one, LOSS.name), one)
        for rate, one in panels.items()
        if isinstance(one, Results)
    }
    arms = (BASELINE, OURS, DIFFQ, *PARTS)
    if not any((frame["arm"] == arm).any() for frame in frames.values() for arm in arms):
        return NoData("no curve of the sweep stability")

    def draw() -> Figure:
        picture, (row,) = plots.panels(1, len(frames), 2.7, sharey=True)
        for axes, (rate, frame) in zip(row, frames.items(), strict=True):
            axes.set_title(f"rate {rate.replace('x', '×')}")
            for arm in arms:
                if (series := trajectories.level(frame, arm)) is not None:
                    plots.curve(axes, ARMS[arm].look, series.tokens, series.mean, series.band)
            _trunks(axes, frame)
            plots.tokens_axis(axes)
        row[0].set_ylabel("training loss, nats")
        drawn = [ARMS[arm] for arm in arms if any((frame["arm"] == arm).any() for frame in frames.values())]
        plots.legend(picture, [(arm.label, arm.look) for arm in drawn], columns=4)
        return picture

    trials = tuple(dict.fromkeys(str(key) for frame in frames.values() for key in frame["id"]))
    notes = ("Mean and range of seeds; the line across is the trunk's last tenth.", INDUCED + ".")
    return FigureResult(draw, trials, notes)


def _trunks(axes: Axes, frame: pd.DataFrame) -> None:
    """Where the trunk ended; its own curve would hide the arms'."""
    trunk = frame[frame["arm"] == "trunk"]
    if trunk.empty:
        return
    late = trunk[trunk["tokens"] > 0.9 * trunk["tokens"].max()]
    axes.axhline(float(late["value"].mean()), color=plots.theme().quiet, linewidth=0.8, dashes=(4, 2))


DECLARED = Claim(
    id="S1",
    statement="At rates that BF16 does not bear, fewer trials leave their way with all parts sampled (induced, ours).",
    says_of_scale="ours; the paper speaks of 30 G tokens and more",
    kind="lower",
    metric="seeds that leave their way",
    arms=(OURS, DIFFQ),
    baseline=BASELINE,
    margin=Margin(RISE, True, "a loss that ends a tenth above where it was has not recovered"),
)


@claim("gaussws", "S1", DECLARED)
def s1(results: Results) -> Verdict:
    """At the lowest rate at which most of BF16's trials leave their way; by events."""
    found = all_ended(results)
    if not isinstance(chosen(results, SWEEP), Results):
        return not_run(results.scale_name)
    left = [found.get((BASELINE, rate)) for rate in RATES]
    at = next((i for i, one in enumerate(left) if one is None or 2 * one.left > one.seeds), None)
    if at is None:
        return Verdict(Outcome.INCONCLUSIVE, "BF16 bears every rate: nothing was induced")
    rate, theirs = RATES[at], left[at]
    if theirs is None:
        return Verdict(Outcome.INCONCLUSIVE, f"no data: no trial of BF16 has ended at {rate}")
    parts = {f"{TITLES[arm]} at {rate}": _fewer(found.get((arm, rate)), theirs) for arm in (OURS, DIFFQ)}
    return noted(every(parts), *beside(results, BASELINE, OURS, DIFFQ, MINI, MINI_OURS), *_losses(results))


def _fewer(ours: Ended | None, theirs: Ended) -> Verdict:
    if ours is None:
        return Verdict(Outcome.INCONCLUSIVE, "no data: no trial has ended", trials=theirs.trials)
    p_for = more_events(theirs.left, theirs.seeds, ours.left, ours.seeds)
    p_against = more_events(ours.left, ours.seeds, theirs.left, theirs.seeds)
    outcome = Outcome.INCONCLUSIVE
    if min(p_for, p_against) <= ALPHA:
        outcome = Outcome.REPRODUCED if p_for < p_against else Outcome.CONTRADICTED
    return Verdict(
        outcome,
        f"{ours.words} leave their way, and {theirs.words} of BF16's (Fisher's exact test)",
        n=ours.seeds,
        p_for=p_for,
        p_against=p_against,
        trials=(*ours.trials, *theirs.trials),
    )


def _losses(results: Results) -> tuple[str, ...]:
    """How far the sampled arms' last losses are from BF16's, whatever the events say."""
    part = chosen(results, SWEEP)
    words = []
    for rate in RATES:
        for arm in (OURS, DIFFQ):
            if isinstance(part, Results) and part.has(arm, {AXIS: rate}):
                data = compared(part, part.late("loss"), arm, BASELINE, {AXIS: rate})
                if not isinstance(data, NoData | NotRun) and data.values:
                    words.append(f"{TITLES[arm]} {100 * float(np.mean(data.values)):+.1f} % at {rate}")
    return (f"training losses, with their noise, less BF16's: {', '.join(words)}",) if words else ()
