"""Read the states of trials from their run folders; they are stored nowhere else.

The state is the first of these that applies:

done, diverged   result.json exists and has this status
running          a worker holds the lease
failed           failure.json exists; it has the reason and stays until a later attempt succeeds
blocked          the parent failed, is blocked, or diverged before the step at which this trial starts
planned          no other state applies; if there are checkpoints, the trial will resume from the newest
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from fewbits.common.atomic import read_json, write_json
from fewbits.experiments.storage import checkpoints, lease
from fewbits.experiments.storage.results import missing_evaluations
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.planning.plan import Plan, Planned

FAILURE, PROGRESS, LOG, STOP = "failure.json", "progress.json", "log.txt", lease.STOP
HALF_DONE = "half done"  # the text shown instead of `planned` for a trial that will resume from a checkpoint


class State(StrEnum):
    PLANNED = "planned"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DIVERGED = "diverged"
    BLOCKED = "blocked"


OVER = (State.DONE, State.DIVERGED)  # the states of trials that have a result
ENDED = (*OVER, State.FAILED, State.BLOCKED)  # the states of trials that no longer wait or run


@dataclass(frozen=True)
class Failure:
    """The failure of an attempt to compute a trial: the content of `failure.json`."""

    reason: str  # one line
    wrong_input: bool  # True: the input is invalid, so another attempt would fail in the same way
    step: int  # of the newest checkpoint
    log: list[str]  # the last lines of the trial's log


# -------------------------------------------------------------------------------- one run folder


def state(folder: RunFolder) -> State:
    """Return the state of a trial from its run folder; never BLOCKED, which depends on its parents (`trial_statuses`).

    A trial with a damaged `result.json` is FAILED, since the user has to repair the file.
    """
    try:
        result = folder.result()
    except ValueError:
        return State.FAILED
    if result is not None:
        return State(result["status"])
    if holder(folder) is not None:
        return State.RUNNING
    return State.FAILED if (folder.path / FAILURE).exists() else State.PLANNED


def holder(folder: RunFolder) -> lease.Holder | None:
    """Return the process that holds the trial's lease, or None if the lease is free."""
    return lease.holder(folder.path) if folder.path.is_dir() else None


def failure(folder: RunFolder) -> Failure | None:
    """Return the trial's last failure, or None if it has none. A damaged `result.json` is returned as a failure too."""
    try:
        folder.result()
    except ValueError as error:
        return Failure(str(error), wrong_input=True, step=0, log=[])
    data = read_json(folder.path / FAILURE) or {}
    keys = [field.name for field in fields(Failure)]
    return Failure(**{key: data[key] for key in keys}) if data.keys() >= set(keys) else None


def write_failure(folder: RunFolder, failure: Failure) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    write_json(folder.path / FAILURE, asdict(failure))


def progress(folder: RunFolder) -> dict[str, Any] | None:
    """Return the content of `progress.json`, which a worker writes every second; None if it is missing or damaged.

    The keys are step, steps, loss, tokens_per_second and time.
    """
    report = read_json(folder.path / PROGRESS) or {}
    is_valid = report.keys() >= {"step", "steps", "loss"} and all(isinstance(v, int | float) for v in report.values())
    return report if is_valid and report["steps"] >= 1 else None


def reached(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint, from which an interrupted trial resumes; 0 if there is none."""
    return max(checkpoints.steps(folder.checkpoints), default=0)


def last_lines(folder: RunFolder, count: int = 20) -> list[str]:
    """Return the last `count` lines of the trial's log without colours; empty if there is no log."""
    try:
        return plain((folder.path / LOG).read_text(errors="replace")).splitlines()[-count:]
    except OSError:
        return []


def plain(text: str) -> str:
    """Return the text without the terminal's control sequences (such as colours) that Ray and compilers write."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


# -------------------------------------------------------------------------------- a plan


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
        now = state(planned.folder)
        if now is State.PLANNED and key in failed:
            statuses[key] = TrialStatus(State.FAILED)
        elif now is State.FAILED and (reason := failure(planned.folder)) is not None:
            statuses[key] = TrialStatus(now, reason.reason)
        elif now is State.PLANNED and planned.parent is not None:
            statuses[key] = _branch_status(planned, plan.trials[planned.parent], statuses[planned.parent])
        else:
            statuses[key] = TrialStatus(now)
    return statuses


def _branch_status(planned: Planned, parent: Planned, of_parent: TrialStatus) -> TrialStatus:
    """Return the status of a branch that has not started: BLOCKED or PLANNED. of_parent: the parent's status."""
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


def counted(plan: Plan, statuses: Mapping[str, TrialStatus]) -> str:
    """Return the number of trials in each state as text, for example `3 done, 1 failed`.

    Trials in the state PLANNED that have a checkpoint, from which they will resume, are counted as `half done`.
    """
    counts = Counter(
        HALF_DONE if status.state is State.PLANNED and reached(plan.trials[key].folder) else status.state
        for key, status in statuses.items()
    )
    names = [State.PLANNED, HALF_DONE, *(state for state in State if state is not State.PLANNED)]
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])


def finished(planned: Planned) -> bool:
    """Tell whether the trial has a result with the requested evaluations, and all checkpoints that branches need."""
    return _has_result(planned) and planned.folder.has(planned.keep)


def unfinished(plan: Plan) -> set[str]:
    """Return the ids of the trials that have to run.

    A finished trial with a missing checkpoint has to run again only if a trial that has to run starts from this
    checkpoint.
    """
    needed: dict[str, set[int]] = defaultdict(set)
    missing = set()
    for key, planned in reversed(plan.trials.items()):  # branches first, so that their parents find `needed` complete
        if not _has_result(planned) or not planned.folder.has(needed[key]):
            missing.add(key)
            if planned.parent is not None and planned.trial.branch.step is not None:
                needed[planned.parent].add(planned.trial.branch.step)
    return missing


def _has_result(planned: Planned) -> bool:
    return state(planned.folder) in OVER and not any(missing_evaluations(planned.folder, planned.trial))
