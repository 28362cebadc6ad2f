"""Read the state of a trial from its run folder; it is stored nowhere else.

The state is the first of these that applies:

done, diverged   result.json exists and has this status
running          a worker holds the lease
failed           failure.json exists; it has the reason and stays until a later attempt succeeds
planned          no other state applies; if there are checkpoints, the trial will resume from the newest
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from fewbits.common.atomic import read_json, write_json
from fewbits.experiments.storage import checkpoints, lease
from fewbits.experiments.storage.run_folder import RunFolder

FAILURE, PROGRESS, LOG, STOP = "failure.json", "progress.json", "log.txt", lease.STOP


class State(StrEnum):
    PLANNED = "planned"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DIVERGED = "diverged"
    BLOCKED = "blocked"  # its parent failed or diverged; only trial_status.py, which knows the plan, returns this state


OVER = (State.DONE, State.DIVERGED)  # the states of trials that have a result


@dataclass(frozen=True)
class Failure:
    """The failure of an attempt to compute a trial: the content of `failure.json`."""

    reason: str  # one line
    wrong_input: bool  # True: the input is invalid, so another attempt would fail in the same way
    step: int  # of the newest checkpoint
    log: list[str]  # the last lines of the trial's log


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
