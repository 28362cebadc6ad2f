"""What has become of the trials of a plan: read from their folders, where all of it lies.

done, diverged   result.json says so
running          a worker holds the lease
failed           failure.json says how, until the trial is tried again
planned          none of these; with checkpoints, it goes on from the newest
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from fewbits.common.atomic import write_json
from fewbits.experiments.runs import checkpoints
from fewbits.experiments.runs.run_folder import RunFolder
from fewbits.sweeps.running import lease

FAILURE, PROGRESS, LOG, STOP = "failure.json", "progress.json", "log.txt", "stop"


class State(StrEnum):
    PLANNED = "planned"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DIVERGED = "diverged"
    BLOCKED = "blocked"  # what it starts from will not come: standing.py, from the whole plan


OVER = (State.DONE, State.DIVERGED)


@dataclass(frozen=True)
class Failure:
    """Why a trial stopped for which there is no result."""

    reason: str  # in a line
    wrong_input: bool  # it would be the same again
    step: int
    log: list[str]  # its last lines


def state(folder: RunFolder) -> State:
    """RUNNING before FAILED: what is tried again leaves its last failure until it succeeds or fails anew.

    A result that cannot be read is a failure too: somebody has to look at it.
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
    """Who works on the trial now."""
    return lease.holder(folder.path) if folder.path.is_dir() else None


def failure(folder: RunFolder) -> Failure | None:
    try:
        folder.result()
    except ValueError as error:
        return Failure(str(error), wrong_input=True, step=0, log=[])
    keys = [field.name for field in fields(Failure)]
    data = _json(folder.path / FAILURE, keys)
    return None if data is None else Failure(**{key: data[key] for key in keys})


def write_failure(folder: RunFolder, failure: Failure) -> None:
    folder.path.mkdir(parents=True, exist_ok=True)
    write_json(folder.path / FAILURE, asdict(failure))


def progress(folder: RunFolder) -> dict[str, Any] | None:
    """Of a trial that runs or was interrupted: step, steps, loss, tokens_per_second."""
    found = _json(folder.path / PROGRESS, ("step", "steps", "loss"))
    if found is None or not all(isinstance(value, int | float) for value in found.values()) or found["steps"] < 1:
        return None
    return found


def reached(folder: RunFolder) -> int:
    """The step that it goes on from."""
    return max(checkpoints.steps(folder.checkpoints), default=0)


def last_lines(folder: RunFolder, count: int = 20) -> list[str]:
    try:
        return plain((folder.path / LOG).read_text(errors="replace")).splitlines()[-count:]
    except OSError:
        return []


def plain(text: str) -> str:
    """Without the colours that Ray and compilers give to a terminal."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)


def _json(path: Path, keys: Collection[str]) -> dict[str, Any] | None:
    """An object with these keys. What is only said of a trial may be lost, or damaged."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() >= set(keys) else None
