"""Manage the folder of one run: its files, its lock, and its result.

    RUNS/<slug>-<hash8>/  config.yaml  provenance.json  metrics.parquet  numerics.parquet  checkpoints/
                          precision.parquet  evaluation.parquet  result.json

A trial's folder is found by `hash8`, the start of its id, so that equal trials with different names share it. One
process writes at a time. `result.json` is written last: if it exists, the trial has ended, with status done or
diverged.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fewbits.common.atomic import checked_json, remove_folder, remove_leftovers, write_atomically, write_json
from fewbits.common.locks import locked
from fewbits.experiments.identity import computed_by_todays_sources, possible_identities, trial_id
from fewbits.experiments.storage.checkpoints import Checkpoint, load, newest, steps
from fewbits.experiments.trial import Trial

NO_LOCKS = "leases keep the trials of sweeps apart; do not run the same trial twice with `fewbits train`"
TOKENIZER = "tokenizer.json"  # of an imported run
LOCK = ".lock"  # it contains the id of the process that has locked it
HASH = 8  # hexadecimal digits of the id in a folder's name
LEAST = 4  # the fewest digits that are accepted as the name of a run


class Busy(ValueError):
    """An error: another process writes to the folder."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, with the id of its trial."""

    path: Path
    id: str

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def kept(self) -> Path:
        """The folder of checkpoints that are kept permanently, for branches and probes."""
        return self.path / "kept"

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """Return the checkpoint of a step; without a step, the newest intact one."""
        folders = (self.checkpoints, self.kept)
        if step is None and (latest := newest(*folders)) is not None:
            return latest
        available = {at: path for folder in folders for at, path in steps(folder).items()}
        if step not in available:
            missing = "intact checkpoint" if step is None else f"checkpoint of step {step}"
            steps_there = f"; available are {', '.join(map(str, sorted(available)))}" if available else ", and no other"
            raise ValueError(f"{self.path} has no {missing}{steps_there}")
        return load(available[step])

    def has(self, wanted: Collection[int]) -> bool:
        """Tell whether the checkpoints of these steps exist. After a divergence only earlier steps are required."""
        available, result = {**steps(self.kept), **steps(self.checkpoints)}, self.result() or {}
        end = result["step"] if result.get("status") == "diverged" else math.inf
        return all(step in available or step >= end for step in wanted)

    def reopen(self, wanted: Collection[int]) -> None:
        """Make a finished trial train again, so that it keeps the checkpoints of the wanted steps."""
        (self.path / "result.json").unlink()
        # Another process may have kept them meanwhile; then no checkpoint is removed.
        first = min(set(wanted) - set(steps(self.kept)), default=math.inf)
        for step, path in steps(self.checkpoints).items():
            if step > first:
                remove_folder(path)

    @property
    def over(self) -> bool:
        """Tell whether the trial has a result file, without reading it."""
        return (self.path / "result.json").exists()

    def result(self) -> dict[str, Any] | None:
        """Return the trial's result, or None if it has not ended; raise ValueError for a damaged or foreign result."""
        path = self.path / "result.json"
        try:
            result = checked_json(path)
        except ValueError as error:
            raise ValueError(f"{error}; remove this file and run the trial again") from None
        if result is not None and (
            result.get("id") != self.id
            or result.get("status") not in ("done", "diverged")
            or not isinstance(result.get("step"), int)
        ):
            raise ValueError(f"{path} is not this trial's result; remove this file and run the trial again")
        return result

    def provenance(self) -> dict[str, Any] | None:
        return checked_json(self.path / "provenance.json")

    def begin(self, trial: Trial, provenance: Mapping[str, Any]) -> None:
        """Write the config and the provenance before the trial trains. Only the run's writer may call this."""
        for folder in (self.path, self.checkpoints, self.kept):
            if folder.is_dir():
                remove_leftovers(folder)
        text = yaml.safe_dump(plain(trial.to_dict()), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text.encode())
        before = (self.provenance() or {}).get("segments", [])
        write_json(self.path / "provenance.json", {"id": self.id, **provenance, "segments": before})

    def add_segment(self, segment: Mapping[str, Any]) -> None:
        """Record a segment: the environment that computes the next steps. Only the run's writer may call this."""
        provenance = self.provenance() or {}
        write_json(
            self.path / "provenance.json", {**provenance, "segments": [*provenance.get("segments", []), segment]}
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the folder's lock as its only writer. Raise Busy if another live process holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            lock = held.enter_context((self.path / LOCK).open("a"))
            try:
                held.enter_context(locked(lock, NO_LOCKS, wait=False))
            except BlockingIOError:
                raise Busy(f"{self.path}: another process is running this trial") from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield


def find(runs: Path, slug: str, made_of: Mapping[str, Any], expected: str | None = None) -> RunFolder:
    """Return the folder where the trial is or will be stored.

    A folder that was computed by other sources than the current ones counts too, if both are proven to give the same
    bits on the kind of device and the instruction set that computed it.

    expected: the id that the trial was planned with. If it is one of the trial's possible ids, only its folder counts.
    """
    ids = [trial_id(identity) for identity in possible_identities(made_of)]
    for number, possible in enumerate([expected] if expected in ids else ids):
        folder = existing(runs, possible)
        if folder is not None and (number == 0 or computed_by_todays_sources(folder.provenance() or {})):
            return folder
    new = expected if expected in ids else ids[0]
    return RunFolder(runs / f"{slug}-{new[:HASH]}", new)


def existing(runs: Path, trial_id: str) -> RunFolder | None:
    """Return the folder of the trial with this id; None if there is none."""
    for path in sorted(runs.glob(f"*-{trial_id[:HASH]}")):
        folder = RunFolder(path, trial_id)
        if (folder.provenance() or {"id": trial_id}).get("id") != trial_id:
            raise ValueError(
                f"{path} belongs to another trial whose id begins with the same digits; move that folder away"
            )
        return folder
    return None


def opened(path: Path) -> RunFolder:
    """Return the folder of an existing run, such as a branch's parent; raise ValueError if the path is not one."""
    provenance = checked_json(path / "provenance.json")
    if provenance is None:
        raise ValueError(f"{path} is no run folder: it has no provenance.json")
    if not isinstance(provenance.get("id"), str):
        raise ValueError(f"{path / 'provenance.json'} has no id, so the run cannot be identified")
    return RunFolder(path, provenance["id"])


def find_run(name: str, runs: Path) -> Path:
    """Return the folder of a run that has started.

    name: its path, its folder in the store `runs`, or the first digits of its hash; `STORE/DIGITS` names a run of
        another store. Raise ValueError if no run or more than one matches.
    """
    paths = (expanded(name), runs / name)
    for path in paths:
        if name and (path / "provenance.json").is_file():
            return path
    store, digits = (paths[0].parent, paths[0].name) if "/" in name else (runs, name)
    if not re.fullmatch(rf"[0-9a-f]{{{LEAST},64}}", digits):
        if name and paths[0].is_dir():
            raise ValueError(f"{paths[0]} is no run folder: it has no provenance.json")
        raise ValueError(
            f"no run {name!r} has started in {store}: name a run folder, or {LEAST} or more digits of its hash"
        )
    started = sorted(store.glob("*-*/provenance.json")) if store.is_dir() else []
    matches = [path.parent for path in started if _begins(path.parent, digits)]
    if not matches:
        raise ValueError(f"no run in {store} has a hash that begins with {digits!r}")
    if len(matches) > 1:
        shown = ", ".join(path.name for path in matches[:3]) + (", …" if len(matches) > 3 else "")
        raise ValueError(
            f"{len(matches)} runs in {store} have a hash that begins with {digits!r}: {shown}: give more digits"
        )
    return matches[0]


def expanded(name: str) -> Path:
    """Return a path with the home folder for `~` or `~USER`; other names that begin with `~` stay as they are."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _begins(folder: Path, digits: str) -> bool:
    short = folder.name.rpartition("-")[2]
    return short.startswith(digits[:HASH]) and (len(digits) <= HASH or opened(folder).id.startswith(digits))


def saved_trial(path: Path) -> Trial:
    """Return the trial of a run folder. An imported run has its tokenizer beside it, wherever the store is."""
    try:
        trial = Trial.from_dict(yaml.safe_load((path / "config.yaml").read_text("utf-8")))
        own = path / TOKENIZER
        return replace(trial, data=replace(trial.data, tokenizer=f"file:{own}")) if own.is_file() else trial
    except OSError as error:
        raise ValueError(f"{path} is no run folder: {error.strerror}: config.yaml") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path / 'config.yaml'} is not the config of a trial: {error}") from None


def plain(value: Any) -> Any:
    """Return a value with lists instead of tuples, for YAML and JSON."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value
