"""Make Table A, which the GaussWS paper does not have: how many trials become unstable at too high learning rates.

The paper's BF16 run diverges after 30 G tokens; we cannot train that long. Here arms start from a trunk's checkpoint
and continue at 3, 10 and 30 times the trunk's learning rate (reasons: sweeps/config/gaussws/stability.yaml). The
criterion was fixed before the first run: a trial *leaves the trunk's level* if it diverges, or if its training loss is
more than 10 % above the trunk's. Each loss is the mean over the last tenth of the run's steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fewbits.analysis.engine.results.arms import BASELINE, arm_table
from fewbits.analysis.engine.results.data import NoData
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.places import not_planned, sweep_places, trial_ids
from fewbits.analysis.report.items import Setting, Table, TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.registry import table
from fewbits.sweeps.planning.store import State

SWEEP, UNDER_MINI = "stability", "stability-mini"
SWEEPS = {
    SWEEP: (BASELINE, "gaussws", "diffq", "qkv", "out", "up", "down", "od"),
    UNDER_MINI: ("adam-mini", "adam-mini-gaussws"),
}
RISE = 0.1
AXIS, RATES = "rate", ("x3", "x10", "x30")
CRITERION = (
    f"A trial leaves the trunk's level if it diverges or its final loss is more than {RISE:.0%} above the trunk's"
)
INDUCED = "We induce this instability by raising the learning rate; it is no test of training as long as the paper's"


@dataclass(frozen=True)
class Ended:
    """The results of an arm's trials at one learning rate that finished or diverged, compared with their trunks.

    A trial leaves the trunk's level if it diverges, or if its training loss exceeds (1 + RISE) times its trunk's.
    """

    left: int  # the number of trials that left the trunk's level
    rises: tuple[float, ...]  # loss / the trunk's loss - 1, for each trial with a finite loss
    trials: tuple[str, ...]  # the ids of the trials, one for each seed

    @property
    def seeds(self) -> int:
        return len(self.trials)

    @property
    def text(self) -> str:
        return f"{self.left} of {self.seeds}"


def ended(of_sweep: Results, arm: str, rate: str) -> Ended | None:
    """Return the results of an arm's finished and diverged trials at one learning rate; None if there are none.

    of_sweep: the results of one of SWEEPS. rate: one of RATES, such as x3, which is 3 times the learning rate of the
    trunk.
    """
    late, states = of_sweep.late("loss"), dict(zip(of_sweep.trials["id"], of_sweep.trials["state"], strict=True))
    left = 0
    rises: list[float] = []
    trials: list[str] = []
    for key in trial_ids(of_sweep, arm, {AXIS: rate}).values():
        parent = of_sweep.plan.trials[key].parent
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
    """Return `ended` for each arm in SWEEPS and each of RATES, by (arm, rate).

    Arms and rates of which no trial has finished or diverged are left out.
    """
    found = {}
    for sweep, arms in SWEEPS.items():
        part = sweep_places(results, sweep)
        if isinstance(part, Results):
            for arm in arms:
                for rate in RATES:
                    if part.has(arm, {AXIS: rate}) and (one := ended(part, arm, rate)) is not None:
                        found[arm, rate] = one
    return found


@table("gaussws", "Table A", "Induced instability: seeds that leave the trunk's level, and the change of their loss")
def table_a(results: Results) -> Table:
    """Return a table with two rows for each arm and a column for each learning rate.

    The first row has the number of trials that diverged or for which loss / the trunk's loss − 1 exceeds RISE. The
    second row has the mean of loss / the trunk's loss − 1 over the trials with a finite loss.
    """
    found = all_ended(results)
    if not found:
        there = isinstance(sweep_places(results, SWEEP), Results)
        return NoData("no trial of the sweep stability has ended") if there else not_planned(results)
    rows = []
    for arm in dict.fromkeys(name for name, _ in found):
        cells = [found.get((arm, rate)) for rate in RATES]
        rows.append(TableRow(arm_table("gaussws").title(arm), tuple(map(_count, cells)), "of seeds"))
        rows.append(TableRow("    loss over its trunk's", tuple(map(_rise, cells)), "%"))
    notes = (CRITERION, "Learning rates are multiples of the trunk's and apply from its checkpoint on", INDUCED)
    return TableResult(RATES, tuple(rows), notes)


def _count(one: Ended | None) -> TableCell:
    return TableCell(Setting("") if one is None else Setting(one.text, one.trials))


def _rise(one: Ended | None) -> TableCell:
    if one is None or not one.rises:
        return TableCell(Setting("" if one is None else "diverged"))
    return TableCell(Value(100 * float(np.mean(one.rises)), None, len(one.rises), one.trials))
