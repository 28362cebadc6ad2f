"""The folder of one run: who may write in it, what lies there, and how a finished one is known.

    RUNS/<slug>-<hash8>/  config.yaml  provenance.json  metrics.parquet  numerics.parquet  checkpoints/  result.json

A trial's folder is found by the hash alone, so that equal trials of other names share it. One process writes at a time.
`result.json` is written last; where it is, the trial is over, be it done or diverged.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fewbits.common.atomic import remove_folder, remove_leftovers, write_atomically, write_json
from fewbits.experiments.runs.checkpoints import Checkpoint, load, newest, steps
from fewbits.experiments.identity import computed_by_todays_sources, possible_identities, trial_id
from fewbits.experiments.trial import Trial
from fewbits.common.locks import locked

NO_LOCKS = "leases keep the trials of sweeps apart; do not run the same trial twice with `fewbits train`"
HASH = 8  # hexadecimal digits of the id in a folder's name


class Busy(ValueError):
    """Another process writes in the folder."""


@dataclass(frozen=True)
class RunFolder:
    path: Path
    id: str

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def kept(self) -> Path:
        """Checkpoints that stay, for branches and probes."""
        return self.path / "kept"

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """That of a step; without one, the newest that is whole."""
        places = (self.checkpoints, self.kept)
        if step is None and (found := newest(*places)) is not None:
            return found
        there = {at: path for place in places for at, path in steps(place).items()}
        if step not in there:
            what = "whole checkpoint" if step is None else f"checkpoint of step {step}"
            raise ValueError(f"{self.path} has no {what}; there are {', '.join(map(str, sorted(there))) or 'none'}")
        return load(there[step])

    def has(self, wanted: Collection[int]) -> bool:
        """Whether there are checkpoints of these steps; of a trial that has diverged, of those before that."""
        there, result = {**steps(self.kept), **steps(self.checkpoints)}, self.result() or {}
        end = result["step"] if result.get("status") == "diverged" else math.inf
        return all(step in there or step >= end for step in wanted)

    def reopen(self, wanted: Collection[int]) -> None:
        """Have a finished trial trained once more, for checkpoints that nobody asked to be kept at the time."""
        (self.path / "result.json").unlink()
        first = min(set(wanted) - set(steps(self.kept)))
        for step, path in steps(self.checkpoints).items():
            if step > first:
                remove_folder(path)

    @property
    def over(self) -> bool:
        """As far as a look tells: there is a result, whole or not."""
        return (self.path / "result.json").exists()

    def result(self) -> dict[str, Any] | None:
        path = self.path / "result.json"
        try:
            result = _json(path)
        except ValueError as error:
            raise ValueError(f"{error}: remove it, and it is made again") from None
        if result is not None and (
            result.get("id") != self.id
            or result.get("status") not in ("done", "diverged")
            or not isinstance(result.get("step"), int)
        ):
            raise ValueError(f"{path} is not this trial's result: remove it, and it is made again")
        return result

    def provenance(self) -> dict[str, Any] | None:
        return _json(self.path / "provenance.json")

    def begin(self, trial: Trial, provenance: Mapping[str, Any]) -> None:
        """Say what this run is, before it trains. Only its writer may call this."""
        for folder in (self.path, self.checkpoints, self.kept):
            if folder.is_dir():
                remove_leftovers(folder)
        text = yaml.safe_dump(plain(trial.to_dict()), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text.encode())
        before = (self.provenance() or {}).get("segments", [])
        write_json(self.path / "provenance.json", {"id": self.id, **provenance, "segments": before})

    def add_segment(self, segment: Mapping[str, Any]) -> None:
        """Record which environment computes the steps from here on. Only the run's writer may call this."""
        provenance = self.provenance() or {}
        write_json(
            self.path / "provenance.json", {**provenance, "segments": [*provenance.get("segments", []), segment]}
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """As its one writer; Busy where another process is at it. A killed one leaves no lock behind."""
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            lock = held.enter_context((self.path / ".lock").open("a"))
            try:
                held.enter_context(locked(lock, NO_LOCKS, wait=False))
            except BlockingIOError:
                raise Busy(f"{self.path}: another process is running this trial") from None
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield


def find(runs: Path, slug: str, made_of: Mapping[str, Any], expected: str | None = None) -> RunFolder:
    """Return the folder where the trial lies, or will lie.

    A folder of sources that are proven to give the same bits where it was computed is the trial's too.
    expected: the id that the trial was planned with; the folder is that one's if the trial may have it.
    """
    ids = [trial_id(one) for one in possible_identities(made_of)]
    for number, one in enumerate([expected] if expected in ids else ids):
        folder = _existing(runs, one)
        if folder is not None and (number == 0 or computed_by_todays_sources(folder.provenance() or {})):
            return folder
    new = expected if expected in ids else ids[0]
    return RunFolder(runs / f"{slug}-{new[:HASH]}", new)


def _existing(runs: Path, trial_id: str) -> RunFolder | None:
    for path in sorted(runs.glob(f"*-{trial_id[:HASH]}")):
        folder = RunFolder(path, trial_id)
        if (folder.provenance() or {"id": trial_id}).get("id") != trial_id:
            raise ValueError(f"{path} holds another trial whose id begins alike; move it away")
        return folder
    return None


def opened(path: Path) -> RunFolder:
    """A run that exists, a branch's parent say."""
    provenance = _json(path / "provenance.json")
    if provenance is None:
        raise ValueError(f"{path} is no run: it has no provenance.json")
    if not isinstance(provenance.get("id"), str):
        raise ValueError(f"{path / 'provenance.json'} names no id: no run can be known by it")
    return RunFolder(path, provenance["id"])


def saved_trial(path: Path) -> Trial:
    """The trial of a run folder."""
    try:
        return Trial.from_dict(yaml.safe_load((path / "config.yaml").read_text("utf-8")))
    except OSError as error:
        raise ValueError(f"{path} is no run: {error.strerror}: config.yaml") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path / 'config.yaml'} is not a trial's: {error}") from None


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found


def plain(value: Any) -> Any:
    """With lists for tuples, as YAML and JSON have it."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value
