"""How each trial of a plan stands: as its folder says, or blocked, where what it starts from will not come.

`fewbits status`, a dry run, the summary of a sweep and MLflow all ask here, so that they say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fewbits.experiments.runs import checkpoints
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.store import State


@dataclass(frozen=True)
class TrialStatus:
    state: State
    why: str = ""  # of one that failed, or is blocked
    for_good: bool = False  # blocked, and the same command will not change it


def trial_statuses(plan: Plan, failed: Collection[str] = ()) -> dict[str, TrialStatus]:
    """By trial. failed: those that a driver saw fail, which on a full disk their folders do not say."""
    found: dict[str, TrialStatus] = {}
    for key, planned in plan.trials.items():  # parents come before their branches
        state = store.state(planned.folder)
        if state is State.PLANNED and key in failed:
            found[key] = TrialStatus(State.FAILED)
        elif state is State.FAILED and (failure := store.failure(planned.folder)) is not None:
            found[key] = TrialStatus(state, failure.reason)
        elif state is State.PLANNED and planned.parent is not None:
            found[key] = _below(planned, plan.trials[planned.parent], found[planned.parent])
        else:
            found[key] = TrialStatus(state)
    return found


def _below(planned: Planned, parent: Planned, above: TrialStatus) -> TrialStatus:
    name = parent.folder.path.name
    if above.state is State.DIVERGED and lacks(parent, planned.trial.branch.step):
        why = f"its parent {name} diverged before step {planned.trial.branch.step}"
        return TrialStatus(State.BLOCKED, why, for_good=True)
    if above.state in (State.FAILED, State.BLOCKED):
        how = "failed" if above.state is State.FAILED else "is blocked"
        return TrialStatus(State.BLOCKED, f"its parent {name} {how}", above.for_good)
    return TrialStatus(State.PLANNED)


def lacks(parent: Planned, step: int | None) -> bool:
    """Whether the checkpoint that a branch starts from is not there."""
    return step not in {**checkpoints.steps(parent.folder.kept), **checkpoints.steps(parent.folder.checkpoints)}


def counted(states: Iterable[State]) -> str:
    """`3 done, 1 failed`, in the order of the states."""
    counts = Counter(states)
    return ", ".join(f"{counts[state]} {state}" for state in State if counts[state])


def table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """In columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
