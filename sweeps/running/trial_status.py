"""Determine the status of each trial of a plan: the state in its run folder, or blocked by a failed or diverged parent.

`fewbits status`, the dry run, the summary of a sweep and MLflow all use this module, so that they show the same states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fewbits.experiments.storage import checkpoints
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.store import State

HALF_DONE = "half done"  # the text shown instead of `planned` for a trial that will resume from a checkpoint


@dataclass(frozen=True)
class TrialStatus:
    """The status of a trial in its plan."""

    state: State
    why: str = ""  # why the trial failed or is blocked; empty in other states
    blocked_permanently: bool = False  # whether running the same command again cannot end the state `blocked`


def trial_statuses(plan: Plan, failed: Collection[str] = ()) -> dict[str, TrialStatus]:
    """Return the status of each trial of the plan, by trial id.

    failed: ids of trials that failed under this process's drivers. They are needed on a full disk, where the failure
    could not be written into the run folder.
    """
    statuses: dict[str, TrialStatus] = {}
    for key, planned in plan.trials.items():  # a parent comes before its branches, which need its status
        state = store.state(planned.folder)
        if state is State.PLANNED and key in failed:
            statuses[key] = TrialStatus(State.FAILED)
        elif state is State.FAILED and (failure := store.failure(planned.folder)) is not None:
            statuses[key] = TrialStatus(state, failure.reason)
        elif state is State.PLANNED and planned.parent is not None:
            statuses[key] = _branch_status(planned, plan.trials[planned.parent], statuses[planned.parent])
        else:
            statuses[key] = TrialStatus(state)
    return statuses


def half_done(plan: Plan, statuses: Mapping[str, TrialStatus]) -> int:
    """Return how many trials are in the state PLANNED and have a checkpoint, from which they will resume."""
    planned = (plan.trials[key].folder for key, status in statuses.items() if status.state is State.PLANNED)
    return sum(store.reached(folder) > 0 for folder in planned)


def _branch_status(planned: Planned, parent: Planned, of_parent: TrialStatus) -> TrialStatus:
    """Return the status of a branch that has not started: BLOCKED or PLANNED.

    It is BLOCKED if its parent diverged before the step at which the branch starts, failed, or is blocked itself.
    of_parent: the parent's status.
    """
    name = parent.folder.path.name
    if of_parent.state is State.DIVERGED and lacks_checkpoint(parent, planned.trial.branch.step):
        why = f"its parent {name} diverged before step {planned.trial.branch.step}"
        return TrialStatus(State.BLOCKED, why, blocked_permanently=True)
    if of_parent.state in (State.FAILED, State.BLOCKED):
        verb = "failed" if of_parent.state is State.FAILED else "is blocked"
        return TrialStatus(State.BLOCKED, f"its parent {name} {verb}", of_parent.blocked_permanently)
    return TrialStatus(State.PLANNED)


def lacks_checkpoint(parent: Planned, step: int | None) -> bool:
    """Tell whether the parent's run folder lacks the checkpoint of `step`, from which a branch starts.

    The result is True if `step` is None.
    """
    return step not in {**checkpoints.steps(parent.folder.kept), **checkpoints.steps(parent.folder.checkpoints)}


def counted(states: Iterable[State], half_done: int = 0) -> str:
    """Return the number of trials in each state as text, for example `3 done, 1 failed`.

    half_done: how many trials in the state PLANNED will resume from a checkpoint; they are counted as `half done`.
    """
    counts: Counter[str] = Counter(states)
    counts[State.PLANNED] -= half_done
    counts[HALF_DONE] = half_done
    names = [State.PLANNED, HALF_DONE, *(state for state in State if state is not State.PLANNED)]
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])
