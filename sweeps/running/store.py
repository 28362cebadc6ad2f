"""Read the state of a trial from its run folder, which is the only place where it is kept.

done, diverged   as result.json says
running          a worker holds the lease
failed           failure.json has the reason, until the trial is tried again
planned          none of these; with checkpoints, the trial resumes from the newest
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from fewbits.common.atomic import read_json, write_json
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.running import lease

FAILURE, PROGRESS, LOG, STOP = "failure.json", "progress.json", "log.txt", "stop"


class State(StrEnum):
    PLANNED = "planned"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DIVERGED = "diverged"
    BLOCKED = "blocked"  # its parent failed or diverged; trial_status.py decides this from the whole plan


OVER = (State.DONE, State.DIVERGED)


@dataclass(frozen=True)
class Failure:
    """The failure of a trial, which has no result."""

    reason: str  # in one line
    wrong_input: bool  # another attempt would fail in the same way
    step: int
    log: list[str]  # its last lines


def state(folder: RunFolder) -> State:
    """Return the state of a trial, which is never BLOCKED.

    RUNNING comes before FAILED, since a trial that is tried again keeps its last failure until it succeeds or fails
    again. A result that cannot be read counts as a failure, since the user has to repair it.
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
    """Return the worker that holds the trial's lease, or None."""
    return lease.holder(folder.path) if folder.path.is_dir() else None


def failure(folder: RunFolder) -> Failure | None:
    """Return the trial's last failure, or None."""
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
    """Return step, steps, loss and tokens_per_second of a trial that runs or was interrupted, or None."""
    report = read_json(folder.path / PROGRESS) or {}
    is_valid = report.keys() >= {"step", "steps", "loss"} and all(isinstance(v, int | float) for v in report.values())
    return report if is_valid and report["steps"] >= 1 else None


def reached(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint, from which the trial resumes; 0 if there is none."""
    return max(checkpoints.steps(folder.checkpoints), default=0)


def last_lines(folder: RunFolder, count: int = 20) -> list[str]:
    """Return the last lines of the trial's log."""
    try:
        return plain((folder.path / LOG).read_text(errors="replace")).splitlines()[-count:]
    except OSError:
        return []


def plain(text: str) -> str:
    """Return the text without the control sequences for colours that Ray and compilers write."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
