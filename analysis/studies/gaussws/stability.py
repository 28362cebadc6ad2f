"""Induced instability, ours: what becomes of a model that has learned when the learning rate is raised too far.

The paper's BF16 run diverges after 30 G tokens, which is out of reach. Here arms start from one trained checkpoint and
go on at 3, 10 and 30 times its rate (sweeps/config/gaussws/stability.yaml has the reasons). The criterion was fixed
before the first run: a trial *leaves the trunk's level* when its training loss, averaged over its last tenth, ends more
than a tenth above its trunk's, averaged likewise, or when it diverges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fewbits.analysis.engine.arms import BASELINE, arm_table
from fewbits.analysis.engine.data import NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.places import not_planned, sweep_places, trial_ids
from fewbits.analysis.report.items import Setting, Table, TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.registry import table
from fewbits.sweeps.running.store import State

SWEEP, UNDER_MINI = "stability", "stability-mini"
SWEEPS = {
    SWEEP: (BASELINE, "gaussws", "diffq", "qkv", "out", "up", "down", "od"),
    UNDER_MINI: ("adam-mini", "adam-mini-gaussws"),
}
RISE = 0.1
AXIS, RATES = "rate", ("x3", "x10", "x30")
CRITERION = f"A trial leaves the trunk's level when its loss ends more than {RISE:.0%} above it"
INDUCED = "Induced instability, ours and no test of the paper's horizon"


@dataclass(frozen=True)
class Ended:
    """The end of an arm at one rate: how many seeds left the trunk's level, and the losses over the trunk's."""

    left: int
    rises: tuple[float, ...]  # of those whose loss is finite
    trials: tuple[str, ...]

    @property
    def seeds(self) -> int:
        return len(self.trials)

    @property
    def text(self) -> str:
        return f"{self.left} of {self.seeds}"


def ended(part: Results, arm: str, rate: str) -> Ended | None:
    """Return how an arm ended at a rate; None where it has no finished trial there."""
    late, states = part.late("loss"), dict(zip(part.trials["id"], part.trials["state"], strict=True))
    left = 0
    rises: list[float] = []
    trials: list[str] = []
    for key in trial_ids(part, arm, {AXIS: rate}).values():
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
    """Return how all arms of both optimizers ended, by arm and rate."""
    found = {}
    for sweep, arms in SWEEPS.items():
        part = sweep_places(results, sweep)
        if isinstance(part, Results):
            for arm in arms:
                for rate in RATES:
                    if part.has(arm, {AXIS: rate}) and (one := ended(part, arm, rate)) is not None:
                        found[arm, rate] = one
    return found


@table("gaussws", "Table A", "Induced instability: seeds that leave the trunk's level, and the rise of their loss")
def table_a(results: Results) -> Table:
    """List events and rises by arm and rate."""
    found = all_ended(results)
    if not found:
        there = isinstance(sweep_places(results, SWEEP), Results)
        return NoData("no trial of the sweep stability has ended") if there else not_planned(results)
    rows = []
    for arm in dict.fromkeys(name for name, _ in found):
        cells = [found.get((arm, rate)) for rate in RATES]
        rows.append(TableRow(arm_table("gaussws").title(arm), tuple(map(_count, cells)), "of seeds"))
        rows.append(TableRow("    loss over its trunk's", tuple(map(_rise, cells)), "%"))
    notes = (f"{CRITERION}; rates are multiples of the trunk's, from its checkpoint on", INDUCED)
    return TableResult(RATES, tuple(rows), notes)


def _count(one: Ended | None) -> TableCell:
    return TableCell(Setting("") if one is None else Setting(one.text, one.trials))


def _rise(one: Ended | None) -> TableCell:
    if one is None or not one.rises:
        return TableCell(Setting("" if one is None else "diverged"))
    return TableCell(Value(100 * float(np.mean(one.rises)), None, len(one.rises), one.trials))
