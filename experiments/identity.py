"""Compute a trial's id, and describe where its numbers come from.

The id is a hash of what decides a trial's numbers and is the same on every machine: the settings that differ from their
defaults, the fingerprint of the data, the requested kind of device with ranks and threads, the parent of a branch, and
the meaning of the sources that compute (`fingerprint/`). It does not include names, intervals between checkpoints, and
evaluation other than the loss. The environment (torch, processor, GPU, compiler) and the git commit are provenance.

A default is not hashed, so a new setting with a default changes no id. In return the meaning of a default must never
change.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fewbits.common.redaction import redacted
from fewbits.experiments.environment import environment
from fewbits.experiments.fingerprint.equal_bits import equal_fingerprints
from fewbits.experiments.fingerprint.numerics import ROOT, numerics_fingerprint, probe_fingerprint, source_digests
from fewbits.experiments.trial import Trial

# Settings that change no number of a trial, by path.
FREE = {
    "model.name",
    "recipe.name",
    "recipe.about",
    "training.checkpoint_every",
    "training.recompute",
    "evaluation.cloze",
    "evaluation.tasks",
    "evaluation.tasks_path",
    "evaluation.run_code",
}
_BY_CONTENT = ("data", "branch")  # the id contains the data's fingerprint and the parent's identity instead
PROBE = "probe"  # the key of a probe's own sources in its identity
IMPORTED = "imported"  # in the identity of an imported checkpoint: the hash of its weights
_HERE = Path(__file__).parent

Identity = dict[str, Any]


@dataclass(frozen=True)
class ParentPoint:
    """The checkpoint that a branch starts from: the meaning of its trial, its step and the sources that computed it."""

    meaning: str
    step: int
    numerics: tuple[str, ...]  # fingerprints not proven equal to the current sources; usually none


def identity(
    trial: Trial,
    data_fingerprint: str,
    device: str,
    *,
    ranks: int = 1,
    threads: int = 1,
    parent: ParentPoint | None = None,
) -> Identity:
    """Return the values whose hash is the trial's id; none depends on the machine."""
    probe = {PROBE: probe_fingerprint()} if trial.is_probe else {}
    return {
        "config": changed_settings(trial),
        "data": data_fingerprint,
        "device": device,
        "ranks": ranks,  # each rank draws its own noise
        "threads": threads if device == "cpu" else 1,  # torch splits some sums over threads
        "parent": {"meaning": parent.meaning, "step": parent.step} if parent else None,
        "numerics": [numerics_fingerprint(device), *(parent.numerics if parent else ())],
        **probe,
    }


def imported_identity(trial: Trial, data_fingerprint: str, weights: str) -> Identity:
    """Return the identity of an imported checkpoint: its weights, by their hash, and the settings of its probes."""
    made_of = identity(trial, data_fingerprint, "cpu")
    return {**made_of, "numerics": [], IMPORTED: weights}


def trial_id(identity: Mapping[str, Any]) -> str:
    """Return the id of an identity."""
    return _hash(identity)


def meaning(identity: Mapping[str, Any]) -> str:
    """Return the hash of an identity without its sources: of what is requested, not of the code that computes it."""
    return _hash({key: value for key, value in identity.items() if key not in ("numerics", PROBE)})


def possible_identities(made_of: Mapping[str, Any]) -> Iterator[Identity]:
    """Yield the identity, then the same with each fingerprint that is proven equal on at least one instruction set."""
    own, *parents = made_of["numerics"]
    for fingerprint in equal_fingerprints(own, made_of["device"]):
        yield {**made_of, "numerics": [fingerprint, *parents]}


def computed_by_todays_sources(provenance: Mapping[str, Any]) -> bool:
    """Tell whether the current sources would give a run's numbers.

    They do if they have the fingerprint that the run was computed with, or one that is proven to give the same bits on
    the instruction set where it ran.
    """
    if "identity" not in provenance:
        return False
    made_of = provenance["identity"]
    if made_of.get(PROBE) not in (None, probe_fingerprint()):
        return False
    if IMPORTED in made_of:  # no sources computed its weights
        return True
    today = numerics_fingerprint(made_of["device"])
    fingerprints = {(made_of["numerics"][0], None)}
    for segment in provenance.get("segments", ()):
        fingerprints.add((segment["numerics"], segment["environment"]["instruction_set"]))
    return all(
        fingerprint == today or fingerprint in equal_fingerprints(today, made_of["device"], instruction_set)
        for fingerprint, instruction_set in fingerprints
    )


def parent_point(provenance: Mapping[str, Any], step: int) -> ParentPoint:
    """Return the point at which a branch starts: the given step of the run that has this provenance."""
    made_of = provenance["identity"]
    own = () if computed_by_todays_sources(provenance) else (made_of["numerics"][0],)
    return ParentPoint(meaning(made_of), step, tuple(dict.fromkeys((*own, *made_of["numerics"][1:]))))


def changed_settings(trial: Trial) -> dict[str, Any]:
    """Return the settings that affect results and differ from their defaults, nested as in the config."""
    settings = _changed(trial, None, "")
    return {key: value for key, value in settings.items() if key not in _BY_CONTENT}


def all_settings(trial: Trial) -> dict[str, Any]:
    """Return all settings that affect results, including those with their defaults, for people to compare."""
    return {key: value for key, value in _settings(trial, "").items() if key not in _BY_CONTENT}


def _settings(value: Any, path: str) -> dict[str, Any]:
    result = {}
    for field in dataclasses.fields(value):
        item, key = getattr(value, field.name), f"{path}{field.name}"
        if key not in FREE:
            result[field.name] = _settings(item, f"{key}.") if dataclasses.is_dataclass(item) else item
    return result


def _changed(value: Any, default: Any, path: str) -> dict[str, Any]:
    result = {}
    for field in dataclasses.fields(value):
        item, key = getattr(value, field.name), f"{path}{field.name}"
        default_value = field_default(field) if default is None else getattr(default, field.name)
        if dataclasses.is_dataclass(item):
            inner = _changed(item, None if default_value is dataclasses.MISSING else default_value, f"{key}.")
            if inner:
                result[field.name] = inner
        elif key not in FREE and (
            default_value is dataclasses.MISSING or item != default_value or type(item) is not type(default_value)
        ):
            result[field.name] = item
    return result


def field_default(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default; MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def provenance(identity: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of provenance.json: the identity, digests of the sources, this machine, and `facts`."""
    return {
        "identity": dict(identity),
        "sources": source_digests(identity["device"], ROOT),  # file by file, to name the one that changed
        "process": os.getpid(),
        **machine(),
        **facts,
    }


def machine() -> dict[str, Any]:
    """Describe this machine, the git commit and the command line."""
    return {
        "git": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "machine": platform.machine(),
        "host": platform.node(),
        "command": [redacted(argument) for argument in (Path(sys.argv[0]).name, *sys.argv[1:])],
    }


def segment(step: int, kind: str, device: torch.device) -> dict[str, Any]:
    """Describe the segment of a trial that this process computes: its first step, sources and environment.

    kind: the kind of device that the trial requests."""
    return {
        "step": step,
        "numerics": numerics_fingerprint(kind),
        "environment": environment(device),
        "host": platform.node(),
        "time": round(time.time()),
        "git": _git("rev-parse", "HEAD"),
    }


def environments(provenance: Mapping[str, Any]) -> list[Mapping[str, str | None]]:
    """Return the environments that computed a run's steps; where segments overlap, that of the later one counts."""
    segments: list[Mapping[str, Any]] = []
    for part in provenance.get("segments", ()):
        segments = [*(before for before in segments if before["step"] < part["step"]), part]
    return [part["environment"] for part in segments]


def _hash(value: Mapping[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def commit() -> str | None:
    """Return the git commit of this code, or None outside a git repository."""
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(("git", *arguments), cwd=_HERE.resolve(), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
