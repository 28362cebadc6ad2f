"""Compute a trial's id, and describe where its numbers come from (its provenance).

The id is a hash of everything that determines a trial's numbers, and is the same on every machine: the settings, the
fingerprint of the data, the requested kind of device, the numbers of ranks and threads, the parent of a branch, and the
numerics version of the sources (numerics.py). It does not cover names, intervals between checkpoints, or evaluation
other than the loss. A trial that uses hooks of the user's own has a digest of their file. The environment (torch,
processor, GPU, compiler) and the git commit are provenance, not identity.

All settings are hashed, so defaults may change. A setting that is added later would change all ids: it declares its
neutral value, with which a trial computes what it did before the setting existed, and is hashed only where it differs:
`new: int = field(default=0, metadata={"neutral": 0})`.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fewbits.experiments.environment import process_facts
from fewbits.experiments.numerics import announce, changed, numerics, python_digest, running, total
from fewbits.experiments.trial import Trial
from fewbits.models.chain import THEN
from fewbits.models.hooks import OWN, is_own
from fewbits.models.recipe import Recipe

# Paths of settings that change no number of a trial, so the id does not contain them.
FREE = {
    "model.name",
    "recipe.name",
    "recipe.about",
    "recipe.source",
    "recipe.differs",
    "training.checkpoint_every",
    "training.recompute",
    "evaluation.tasks",
    "evaluation.tasks_path",
    "evaluation.tasks_every",
    "evaluation.texts",
    "evaluation.run_code",
}
_BY_CONTENT = ("data", "branch")  # for these settings, the id has the data's fingerprint and the parent's identity
IMPORTED = "imported"  # key in the identity of an imported checkpoint: the hash of its weights

Identity = dict[str, Any]


@dataclass(frozen=True)
class ParentPoint:
    """The checkpoint that a branch starts from: the parent's id, and a step."""

    id: str
    step: int


def identity(
    trial: Trial,
    data_fingerprint: str,
    device: str,
    *,
    ranks: int = 1,
    threads: int = 1,
    parent: ParentPoint | None = None,
) -> Identity:
    """Return the values whose hash is the trial's id. device: the requested kind of device, cpu or cuda."""
    announce()
    return _settings_and_inputs(trial, data_fingerprint, device, ranks, threads, parent) | numerics()


def imported_identity(trial: Trial, data_fingerprint: str, weights: str) -> Identity:
    """Return the identity of an imported checkpoint: `weights`, their hash, stands in place of the numerics version."""
    return _settings_and_inputs(trial, data_fingerprint, "cpu", 1, 1, None) | {IMPORTED: weights}


def _settings_and_inputs(
    trial: Trial, data_fingerprint: str, device: str, ranks: int, threads: int, parent: ParentPoint | None
) -> Identity:
    return {
        "config": all_settings(trial),
        "data": data_fingerprint,
        "device": device,
        "ranks": ranks,  # each rank draws its own noise
        "threads": threads if device == "cpu" else 1,  # torch splits some sums over threads
        "parent": dataclasses.asdict(parent) if parent else None,
    } | own_hooks(trial.recipe)


def own_hooks(recipe: Recipe) -> dict[str, str]:
    """Return a digest of the user's hooks, and of the modules beside them that they import, if the recipe uses one."""
    chains = [text.split(THEN) for text in _strings(dataclasses.asdict(recipe)) if THEN in text]
    if not any(is_own(stage.partition(":")[0].strip()) for stages in chains for stage in stages):
        return {}
    waiting, digests = [OWN], dict[str, str]()
    while waiting:
        file = waiting.pop()
        if file.name not in digests and file.is_file():
            tree = ast.parse(file.read_bytes())
            digests[file.name] = python_digest(tree)
            waiting += [OWN.parent / f"{name.partition('.')[0]}.py" for name in _imported(tree)]
    return {"hooks": total(digests)}


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def trial_id(identity: Mapping[str, Any]) -> str:
    """Return the trial's id, the SHA-256 of its identity."""
    text = json.dumps(identity, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_current(provenance: Mapping[str, Any]) -> bool:
    """Tell whether the running sources would give a run's bits; else it is stale, unless it was imported."""
    made_of = provenance.get("identity")
    if not isinstance(made_of, dict):
        return False
    return IMPORTED in made_of or {key: made_of[key] for key in ("numerics", "edited") if key in made_of} == numerics()


def all_settings(trial: Trial) -> dict[str, Any]:
    """Return the settings that affect results, nested, without `data`, `branch` and settings with a neutral value."""
    return {key: value for key, value in _settings(trial, "").items() if key not in _BY_CONTENT}


def _settings(value: Any, path: str) -> dict[str, Any]:
    result = {}
    for field in dataclasses.fields(value):
        item, key = getattr(value, field.name), f"{path}{field.name}"
        if key not in FREE and not ("neutral" in field.metadata and item == field.metadata["neutral"]):
            result[field.name] = _settings(item, f"{key}.") if dataclasses.is_dataclass(item) else item
            if isinstance(item, tuple):  # such as the rules of a recipe
                result[field.name] = tuple(
                    dataclasses.asdict(one) if dataclasses.is_dataclass(one) and not isinstance(one, type) else one
                    for one in item
                )
    return result


def provenance(identity: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for provenance.json, with `facts`, such as a description of the data and the parent's folder."""
    return {
        "identity": dict(identity),
        # Files that were edited since numerics.txt recorded them; None: a file that was removed.
        "sources": {path: running().get(path) for path in changed()},
        "process": os.getpid(),
        **process_facts(),
        **facts,
    }
