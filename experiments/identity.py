"""Compute a trial's id, and describe where its numbers come from (its provenance).

The id is a hash of everything that determines a trial's numbers, and is the same on every machine. It covers the
settings that differ from their defaults, the fingerprint of the data, the requested kind of device, the numbers of
ranks and threads, the parent of a branch, and a fingerprint of the sources that compute (`fingerprint/`). It does not
cover names, intervals between checkpoints, or evaluation other than the loss. The environment (torch, processor, GPU,
compiler) and the git commit are not in the id: they are recorded as provenance.

Settings that have their defaults are not hashed, so a new setting with a default changes no id. But a default must
never change: trials would keep their ids although their numbers change.
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

# Paths of settings that change no number of a trial, so the id does not contain them.
FREE = {
    "model.name",
    "recipe.name",
    "recipe.about",
    "training.checkpoint_every",
    "training.recompute",
    "evaluation.tasks",
    "evaluation.tasks_path",
    "evaluation.run_code",
}
_BY_CONTENT = ("data", "branch")  # for these settings, the id has the data's fingerprint and the parent's identity
PROBE = "probe"  # key in the identity of a probe: the fingerprint of the sources that compute probes
IMPORTED = "imported"  # key in the identity of an imported checkpoint: the hash of its weights
_HERE = Path(__file__).parent

Identity = dict[str, Any]


@dataclass(frozen=True)
class ParentPoint:
    """The checkpoint that a branch starts from, as described by the values that the branch's id hashes."""

    meaning: str  # hash of the parent's identity without source fingerprints (see the function `meaning`)
    step: int
    numerics: tuple[str, ...]  # the parent's source fingerprints not proven equal to the current one; usually none


def identity(
    trial: Trial,
    data_fingerprint: str,
    device: str,
    *,
    ranks: int = 1,
    threads: int = 1,
    parent: ParentPoint | None = None,
) -> Identity:
    """Return the values whose hash is the trial's id; none of them depends on the machine.

    device: the requested kind of device, cpu or cuda. parent: the checkpoint that a branch starts from.
    """
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
    """Return the identity of an imported checkpoint: the values whose hash is its trial's id.

    fewbits has not computed the weights, so the identity has `weights`, their hash, in place of source fingerprints.
    """
    made_of = identity(trial, data_fingerprint, "cpu")
    return {**made_of, "numerics": [], IMPORTED: weights}


def trial_id(identity: Mapping[str, Any]) -> str:
    """Return the trial's id, the SHA-256 of its identity."""
    return _hash(identity)


def meaning(identity: Mapping[str, Any]) -> str:
    """Return the hash of an identity without its source fingerprints: it identifies what is computed, not the code."""
    return _hash({key: value for key, value in identity.items() if key not in ("numerics", PROBE)})


def possible_identities(made_of: Mapping[str, Any]) -> Iterator[Identity]:
    """Yield the identity `made_of`, then a copy for each other version of the sources that gives the same bits.

    Each copy has that version's numerics fingerprint in place of the trial's own. A trial that is stored under one of
    these identities may not need training again. The versions are those that pairs in `fingerprint/equal_bits.json`
    connect. Each pair was tested on one instruction set, and pairs of all instruction sets are used here. Therefore the
    caller has to check, by `computed_by_installed_sources`, whether the bits are the same on the instruction set on
    which the stored trial was computed.
    """
    own, *parents = made_of["numerics"]
    for fingerprint in equal_fingerprints(own, made_of["device"]):
        yield {**made_of, "numerics": [fingerprint, *parents]}


def computed_by_installed_sources(provenance: Mapping[str, Any]) -> bool:
    """Tell whether the installed sources would give the same bits as the sources that computed a run.

    If not, the run is stale. The bits are the same if each source fingerprint of the run is the current one, or is
    proven to give the same bits on the instruction set where the run was computed. A probe also needs the current probe
    fingerprint. An imported checkpoint is never stale. provenance: the content of the run's provenance.json.
    """
    if "identity" not in provenance:
        return False
    made_of = provenance["identity"]
    if made_of.get(PROBE) not in (None, probe_fingerprint()):
        return False
    if IMPORTED in made_of:  # no sources computed the weights of an imported checkpoint
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
    """Return the checkpoint that a branch starts from: the given step of the run with this provenance.json."""
    made_of = provenance["identity"]
    own = () if computed_by_installed_sources(provenance) else (made_of["numerics"][0],)
    return ParentPoint(meaning(made_of), step, tuple(dict.fromkeys((*own, *made_of["numerics"][1:]))))


def changed_settings(trial: Trial) -> dict[str, Any]:
    """Return the settings that affect results and differ from their defaults, nested as in the config.

    The sections `data` and `branch` are not included.
    """
    settings = _changed(trial, None, "")
    return {key: value for key, value in settings.items() if key not in _BY_CONTENT}


def all_settings(trial: Trial) -> dict[str, Any]:
    """Return all settings that affect results, including those that have their defaults, nested as in the config.

    Explanations of the differences between two trials use them. The sections `data` and `branch` are not included.
    """
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
    """Return the default of a dataclass field, or `dataclasses.MISSING` if the field has no default."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def provenance(identity: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for provenance.json: identity, source digests, process id, `process_facts()`, the items of `facts`.

    facts: further values by name, such as a description of the data and the parent's folder.
    """
    return {
        "identity": dict(identity),
        "sources": source_digests(identity["device"], ROOT),  # of each file, so that a message can name a changed file
        "process": os.getpid(),
        **process_facts(),
        **facts,
    }


def process_facts() -> dict[str, Any]:
    """Return the version of the code, the machine and the command line of this process, for provenance.json.

    git, git_dirty: the commit, and whether files differ from it. machine: the processor's type, such as x86_64.
    host: the machine's name. command: the parts of the command line, with `***` in place of credentials.
    """
    return {
        "git": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "machine": platform.machine(),
        "host": platform.node(),
        "command": [redacted(argument) for argument in (Path(sys.argv[0]).name, *sys.argv[1:])],
    }


def segment(step: int, kind: str, device: torch.device) -> dict[str, Any]:
    """Return a description, for provenance.json, of a segment: the steps of a trial that this process computes.

    step: the number of steps that were done before. kind: the kind of device that the trial requests, cpu or cuda.
    """
    return {
        "step": step,
        "numerics": numerics_fingerprint(kind),
        "environment": environment(device),
        "host": platform.node(),
        "time": round(time.time()),
        "git": _git("rev-parse", "HEAD"),
    }


def environments(provenance: Mapping[str, Any]) -> list[Mapping[str, str | None]]:
    """Return the environment (versions, processor, GPU) of each segment of a run, in order.

    A segment is the steps that one process computed. A segment is omitted if a later process started at or before its
    first step, and so computed its steps again. provenance: the content of provenance.json.
    """
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
