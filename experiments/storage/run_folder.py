"""Manage the folder of one run: its files and its result.

    RUNS/<slug>-<hash8>/  config.yaml  provenance.json  metrics.parquet  numerics.parquet  checkpoints/
                          precision.parquet  evaluation.parquet  result.json

A trial's folder is found by `hash8`, the first 8 digits of the trial's id, so that equal trials with different names
use the same folder. Only the process that holds the lease (lease.py) writes to a folder. `result.json` is written last:
if it exists, the trial has ended, with the status `done` or `diverged`.

A branch (docs/training.md) takes over weights, optimizer state and position in the data from a checkpoint of another
trial, its parent. Its identity contains the parent's id and step, not its path. An imported checkpoint has read no data
and has no optimizer, so a branch from it may have any seed, length and optimizer.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fewbits.common.atomic import checked_json, remove_folder, remove_leftovers, write_atomically, write_json
from fewbits.experiments.data.corpus import Corpus, DataConfig
from fewbits.experiments.environment import Computed, computed, environments
from fewbits.experiments.identity import IMPORTED, ParentPoint, trial_id
from fewbits.experiments.storage.checkpoints import Checkpoint, load, newest, steps
from fewbits.experiments.trial import Branch, Trial

TOKENIZER = "tokenizer.json"  # only in the folder of an imported run
HASH = 8  # hexadecimal digits of the id in a folder's name
LEAST = 4  # the smallest number of digits of an id that may be given to name a run


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, which may not exist yet, and the id of its trial."""

    path: Path
    id: str

    @property
    def checkpoints(self) -> Path:
        """The folder of the newest checkpoints, from which an interrupted trial resumes."""
        return self.path / "checkpoints"

    @property
    def kept(self) -> Path:
        """The folder of checkpoints that are not removed when newer ones are saved, for branches and probes."""
        return self.path / "kept"

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """Return the checkpoint of a step, or for None the newest intact one; raise ValueError if there is none."""
        folders = (self.checkpoints, self.kept)
        if step is None and (latest := newest(*folders)) is not None:
            return latest
        available = {at: path for folder in folders for at, path in steps(folder).items()}
        if step in available:
            return load(available[step])
        if available and step is not None:
            there = ", ".join(map(str, sorted(available)))
            raise ValueError(f"{self.path} has no checkpoint of step {step}; available are {there}: name one of these")
        reason = f"all checkpoints of {self.path} are damaged" if available else f"{self.path} has no checkpoints"
        raise ValueError(f"{reason}: move this folder away, and run the trial again")

    def has(self, wanted: Collection[int]) -> bool:
        """Tell whether the checkpoints of the steps `wanted` exist.

        For a trial that has diverged, only the steps before the divergence are required.
        """
        available, result = {**steps(self.kept), **steps(self.checkpoints)}, self.result() or {}
        end = result["step"] if result.get("status") == "diverged" else math.inf
        return all(step in available or step >= end for step in wanted)

    def rewind(self, wanted: Collection[int]) -> None:
        """Remove the result, and checkpoints after the first missing step of `wanted`, so that training computes it.

        The caller has to keep the removed steps again.
        """
        first = min((step for step in wanted if not self.has([step])), default=math.inf)
        (self.path / "result.json").unlink(missing_ok=True)
        for step, path in [*steps(self.checkpoints).items(), *steps(self.kept).items()]:
            if step > first:
                remove_folder(path)

    @property
    def over(self) -> bool:
        """True if the trial has ended; result.json is not read."""
        return (self.path / "result.json").exists()

    def result(self) -> dict[str, Any] | None:
        """Return the content of result.json, or None if the trial has not ended.

        Raise ValueError if the file is damaged or is the result of another trial.
        """
        path = self.path / "result.json"
        try:
            result = checked_json(path)
        except ValueError as error:
            raise ValueError(f"{error}; remove this file and run the trial again") from None
        valid = result is None or (
            result.get("id") == self.id
            and result.get("status") in ("done", "diverged")
            and isinstance(result.get("step"), int)
        )
        if not valid:
            raise ValueError(f"{path} is damaged or another trial's result; remove this file and run the trial again")
        return result

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json, which ends the trial."""
        write_json(self.path / "result.json", result)

    def provenance(self) -> dict[str, Any] | None:
        """Return the content of provenance.json, or None if the trial has not started."""
        return checked_json(self.path / "provenance.json")

    def computed(self) -> Computed:
        """Return the environments that computed the run's steps; none if it has not started or its file is damaged."""
        try:
            return computed(environments(self.provenance() or {}))
        except ValueError:
            return ()

    def begin(self, trial: Trial, provenance: Mapping[str, Any]) -> None:
        """Write config.yaml and provenance.json, whose segments are kept; remove files of killed processes."""
        for folder in (self.path, self.checkpoints, self.kept):
            if folder.is_dir():
                remove_leftovers(folder)
        text = yaml.safe_dump(plain(trial.to_dict()), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text.encode())
        before = (self.provenance() or {}).get("segments", [])
        write_json(self.path / "provenance.json", {"id": self.id, **provenance, "segments": before})

    def add_segment(self, segment: Mapping[str, Any]) -> None:
        """Add a segment (the environment that computes the next steps) to provenance.json."""
        provenance = self.provenance() or {}
        segments = [*provenance.get("segments", []), segment]
        write_json(self.path / "provenance.json", {**provenance, "segments": segments})


def find(runs: Path, slug: str, made_of: Mapping[str, Any]) -> RunFolder:
    """Return the folder of the trial with the identity `made_of`; a new one has the name `slug`."""
    new = trial_id(made_of)
    return existing(runs, new) or RunFolder(runs / f"{slug}-{new[:HASH]}", new)


def existing(runs: Path, trial_id: str) -> RunFolder | None:
    """Return the folder of the trial with this id in the store `runs`; None if there is none."""
    for path in sorted(runs.glob(f"*-{trial_id[:HASH]}")):
        folder = RunFolder(path, trial_id)
        if (folder.provenance() or {"id": trial_id}).get("id") != trial_id:
            raise ValueError(f"{path} belongs to another trial, whose id begins with the same digits; move it away")
        return folder
    return None


def opened(path: Path) -> RunFolder:
    """Return the run folder at a path; raise ValueError if there is no run folder, or if its trial's id is missing."""
    provenance = checked_json(path / "provenance.json")
    if provenance is None:
        raise ValueError(f"{path} is no run folder: it has no provenance.json; name the folder of a run")
    if not isinstance(provenance.get("id"), str):
        raise ValueError(f"{path / 'provenance.json'} has no trial id: restore the file, or run the trial again")
    return RunFolder(path, provenance["id"])


def find_run(name: str, runs: Path) -> Path:
    """Return the folder of a run that has started; raise ValueError if no run or more than one run matches.

    name: the folder's path, the folder's name in the store `runs`, or the first digits of the trial's id (at least 4);
        `STORE/DIGITS` names a run of another store.
    """
    own = expanded(name)
    for path in (own, runs / name):
        if name and (path / "provenance.json").is_file():
            return path
    store, digits = (own.parent, own.name) if "/" in name else (runs, name)
    if not re.fullmatch(rf"[0-9a-f]{{{LEAST},64}}", digits):
        if name and own.is_dir():
            opened(own)  # raises an error that says what it lacks
        valid = f"name a run folder, or {LEAST} or more digits of its hash"
        raise ValueError(f"no run {name!r} has started in {store}: {valid}")
    matches = [path.parent for path in sorted(store.glob("*-*/provenance.json")) if _begins(path.parent, digits)]
    if not matches:
        remedy = "check the digits, or write STORE/DIGITS for another store"
        raise ValueError(f"no run in {store} has a hash that begins with {digits!r}; {remedy}")
    if len(matches) > 1:
        shown = ", ".join(path.name for path in matches[:3]) + (", …" if len(matches) > 3 else "")
        several = f"{len(matches)} runs in {store} have a hash that begins with {digits!r}"
        raise ValueError(f"{several}: {shown}: give more digits")
    return matches[0]


def expanded(name: str) -> Path:
    """Return a path with a first `~` or `~USER` replaced by the home folder, if there is such a user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _begins(folder: Path, digits: str) -> bool:
    short = folder.name.rpartition("-")[2]
    return short.startswith(digits[:HASH]) and (len(digits) <= HASH or opened(folder).id.startswith(digits))


def saved_trial(path: Path) -> Trial:
    """Return the trial of a run folder, from its config.yaml; raise ValueError if there is no valid config.

    An imported run has the tokenizer.json in its folder, wherever the store is now.
    """
    try:
        trial = Trial.from_dict(yaml.safe_load((path / "config.yaml").read_text("utf-8")))
        own = path / TOKENIZER
        return replace(trial, data=replace(trial.data, tokenizer=f"file:{own}")) if own.is_file() else trial
    except OSError as error:
        raise ValueError(f"{path} is no run folder: config.yaml cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        remedy = "if the file is damaged, remove the run folder and run the trial again"
        raise ValueError(f"{path / 'config.yaml'} is not the config of a trial: {error}: {remedy}") from None


def plain(value: Any) -> Any:
    """Return a nested value in which lists replace tuples, for YAML and JSON."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


# ------------------------------------------------------------------------------------------------ branches

IMPORTED_MODEL = "imported:"  # branch.parent=imported:MODEL names the imported run of a model


@dataclass(frozen=True)
class Parent:
    """The parent of a branch: a run, and the step of the checkpoint to start from."""

    folder: RunFolder
    step: int

    @cached_property
    def point(self) -> ParentPoint:
        """The parent's id and the step, for the identity of the branch."""
        return ParentPoint(self.folder.id, self.step)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The parent's checkpoint, loaded and verified at first access; a branch that resumes does not need it."""
        return self.folder.checkpoint(self.step)

    def check(self, trial: Trial, corpus: Corpus) -> None:
        """Raise ValueError if the trial cannot start from this checkpoint. corpus: the trial's data."""
        imported = IMPORTED in (self.folder.provenance() or {}).get("identity", {})
        path, data = self.folder.path, self.checkpoint.state["data"]
        check_start(trial, corpus.fingerprint, saved_trial(path), data["fingerprint"], path, imported=imported)


def check_start(
    trial: Trial, data: str, parent: Trial, parents_data: str, path: Path, *, imported: bool = False
) -> None:
    """Raise ValueError if the trial, a branch or a probe, cannot start from a checkpoint of the trial `parent`.

    data, parents_data: the fingerprints of the data of both trials. path: the parent's run folder, which need not exist
    yet. imported: the parent is an imported model.
    """
    kind = "probe" if trial.is_probe else "branch"
    if data != parents_data and spelled_data(trial.data) != spelled_data(parent.data):
        raise ValueError(
            f"a {kind} must have the data of its parent: {path} was trained with "
            f"{spelled_data(parent.data)}, not with {spelled_data(trial.data)}"
        )
    trains = not imported and not trial.is_probe
    own, theirs = dict(_inherited(trial, trains)), dict(_inherited(parent, trains))
    differing = [f"{key} {value!r}, not {theirs[key]!r}" for key, value in own.items() if value != theirs[key]]
    if data != parents_data:
        differing.append("the same settings of data give other data here than where the parent trained")
    if differing:
        rounding = "; to change only the seed of rounding and noise, set training.rounding_seed"
        raise ValueError(
            f"a {kind} must have its parent's model and data, but this one differs from {path}: "
            f"{'; '.join(differing)}{rounding if trains and trial.seed != parent.seed else ''}"
        )


def _inherited(trial: Trial, trains: bool) -> Iterator[tuple[str, object]]:
    """Yield the settings (key, value) that must equal the parent's, except those of the data.

    trains: the trial continues the parent's training, with its optimizer state and its order of the data.
    """
    for key, value in asdict(trial.model).items():
        if key != "name" and not (trains and key == "dropout"):  # dropout has no weights
            yield f"model.{key}", value
    if trains:
        yield "seed", trial.seed  # the order of the data depends on it
        yield "training.length", trial.training.length  # the position in the data is a number of such sequences
        yield "optimizer.kind", trial.optimizer.kind
        if trial.data.phases:
            yield "training.batch", trial.training.batch  # phases begin at steps


def _imported_run(model: str, runs: Path) -> Path:
    """Return the folder of the store's imported run of this model; raise ValueError if there is not exactly one."""
    found = [
        file.parent
        for file in sorted(runs.glob(f"{model}-*/provenance.json"))
        if IMPORTED in (checked_json(file) or {}).get("identity", {}) and saved_trial(file.parent).model.name == model
    ]
    if len(found) != 1:
        several = ", ".join(path.name for path in found) or "none"
        raise ValueError(
            f"{IMPORTED_MODEL}{model} needs exactly one imported run of this model in {runs}, and there are {several}: "
            "import the model (fewbits import --help), or set branch.parent to one of the runs"
        )
    return found[0]


def find_parent(branch: Branch, runs: Path) -> Parent | None:
    """Return the parent of a branch; None if the trial has no branch.parent.

    branch.parent is a run's path, name or hash (see `find_run`), or `imported:MODEL` for the imported run of this model
    in the store `runs`. Without branch.step, the parent must have finished, and its last checkpoint is taken.
    """
    if branch.parent is None:
        if branch.step is not None:
            raise ValueError(f"branch.step {branch.step} needs branch.parent: set it to a run")
        return None
    try:
        model = branch.parent.removeprefix(IMPORTED_MODEL)
        path = find_run(branch.parent, runs) if model == branch.parent else _imported_run(model, runs)
    except ValueError as error:
        raise ValueError(f"branch.parent: {error}") from None
    folder = opened(path)
    if branch.step is not None:
        return Parent(folder, branch.step)
    if folder.result() is None:
        raise ValueError(f"branch.parent {path} has not finished: set branch.step to a step of one of its checkpoints")
    return Parent(folder, max({**steps(folder.kept), **steps(folder.checkpoints)}, default=0))


def spelled_data(data: DataConfig) -> str:
    """Return the overrides that select the data, such as `data=python data.size=200000`; defaults are omitted."""
    default = DataConfig()
    changed = {key: value for key, value in asdict(data).items() if key not in ("kind", "repeat")}
    fields = (shlex.quote(f"data.{key}={value}") for key, value in changed.items() if value != getattr(default, key))
    return " ".join([f"data={data.kind}", *fields])
