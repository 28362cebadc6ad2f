"""Store evaluations of a finished run beside it: one JSON file each, in the folder `evaluations` of the run folder.

An evaluation is found again by its key: the task with its settings, the step, and the meaning of the sources that
compute. It does not belong to the trial, so it changes neither the trial's id nor its `result.json`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fewbits.common.atomic import read_json, write_json
from fewbits.common.from_dict import from_dict

FOLDER = "evaluations"
SHOWN = 8  # hexadecimal digits of the key in a file's name


@dataclass(frozen=True)
class Key:
    """The values that determine an evaluation's results."""

    task: str
    settings: dict[str, Any]
    step: int  # of the checkpoint
    numerics: str  # the numerics fingerprint

    @property
    def file(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        slug = re.sub(r"[^\w.]+", "-", self.task)[:40]
        return f"{slug}-{digest[:SHOWN]}.json"


@dataclass(frozen=True)
class Evaluation:
    """The results of one task; they have the shape of the same results in result.json."""

    key: Key
    results: dict[str, Any]
    environment: dict[str, Any]  # the machine and the versions that computed them
    time: int  # seconds since 1970


def find(run: Path, key: Key) -> Evaluation | None:
    """Return the stored evaluation with this key, or None."""
    evaluation = _read(run / FOLDER / key.file)
    return evaluation if evaluation is not None and evaluation.key == key else None


def write(run: Path, evaluation: Evaluation) -> None:
    """Store an evaluation; one with the same key is replaced."""
    (run / FOLDER).mkdir(exist_ok=True)
    write_json(run / FOLDER / evaluation.key.file, asdict(evaluation))


def stored(run: Path) -> list[Evaluation]:
    """Return all evaluations of a run, the oldest first; files that cannot be read are left out."""
    readable = (_read(path) for path in (run / FOLDER).glob("*.json"))
    return sorted((one for one in readable if one is not None), key=lambda one: (one.time, one.key.file))


def with_stored(run: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's result with the results of its stored evaluations at the same step.

    Values of the result itself are kept. Evaluations of some of a task's questions, and those with other operands than
    the recipe's, are left out.
    """
    added: dict[str, Any] = {}
    for one in stored(run):
        partial = any(one.key.settings.get(name) for name in ("limit", "unquantized"))
        if one.key.step == result.get("step") and not partial:
            added = _merged(added, one.results)
    return _merged(added, result)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            both[key] = _merged(below[key], above[key])
    return both


def numbers(results: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield the full name of each number, such as `tasks.piqa.acc,none`, and its value.

    A number that was not finite was stored as null, so its value is None.
    """
    for key, value in results.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, int | float):
            yield f"{prefix}{key}", value


def _read(path: Path) -> Evaluation | None:
    try:
        return from_dict(Evaluation, read_json(path) or {})
    except ValueError:
        return None
