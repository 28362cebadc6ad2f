"""Find what can be removed from a store, and remove it, without harm to running trials and planned branches."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.common.atomic import remove_folder
from fewbits.common.store_folder import bytes_below
from fewbits.common.terminal import notice
from fewbits.experiments.identity import is_current
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.lease import Held, leased
from fewbits.experiments.storage.run_folder import RunFolder, opened
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.stored_plans import UnusablePlan, stored_plans

OLD = 3600.0  # seconds after which an unfinished file directly in the store is assumed to be left by a dead process


@dataclass(frozen=True)
class Item:
    """A file or folder that can be removed."""

    kind: str  # a key of KINDS in commands.py
    path: Path
    run: RunFolder | None = None  # the run that contains `path`, or whose folder `path` is; None: no run of the store

    @property
    def bytes(self) -> int:
        return bytes_below(self.path) if self.path.is_dir() else self.path.stat().st_size


def removable(runs: Path) -> Iterator[Item]:
    """Yield the items that can be removed from the store `runs`; run folders of running trials are left out."""
    started = [*_started(runs)]
    needs = _needs(runs, started)
    for run in started:
        if store.holder(run) is not None:
            continue
        for folder in (run.path, run.checkpoints, run.kept):
            yield from (Item("leftovers", file, run) for file in sorted(folder.glob(".*.partial")))
        # A damaged result does not count: checkpoints are needed to recompute it. Runs of fewbits 0.1.0, which had a
        # list of digests in place of a version, and runs of unknown origin are left alone.
        version = _identity(run).get("numerics")
        if needs is None or store.state(run) not in store.OVER or not version or isinstance(version, list):
            continue
        needed, planned = needs
        name = run.path.name
        if name not in planned and name not in needed and not is_current(run.provenance() or {}):
            yield Item("stale", run.path, run)
        else:
            older = [*checkpoints.steps(run.checkpoints).items()][:-1]
            yield from (Item("checkpoints", folder, run) for step, folder in older if step not in needed.get(name, ()))
    for file in sorted(runs.glob(".*.partial")):
        if time.time() - file.stat().st_mtime > OLD:
            yield Item("leftovers", file)


def _started(runs: Path) -> Iterator[RunFolder]:
    """Yield the runs of a store that have started; print a line for each run that cannot be read, and skip it."""
    for path in sorted(runs.glob("*/provenance.json")):
        try:
            yield opened(path.parent)
        except (OSError, ValueError) as error:
            notice(f"{error}; the run {path.parent.name} is skipped")


def _needs(runs: Path, started: Sequence[RunFolder]) -> tuple[dict[str, set[int]], set[str]] | None:
    """Return the steps of needed checkpoints, by run folder's name, and the names of all run folders in stored plans.

    Needed are the checkpoints from which planned or existing branches start, and those at the steps that a planned
    trial lists in `runtime.keep_steps`. Return None if a plan cannot be read, since this plan may need any run.
    started: the runs of the store.
    """
    needed: dict[str, set[int]] = {}
    planned: set[str] = set()
    unusable: list[UnusablePlan] = []
    for stored in stored_plans(runs, unusable.append):
        for trial in stored.plan.trials.values():
            planned.add(trial.folder.path.name)
            needed.setdefault(trial.folder.path.name, set()).update(trial.keep, trial.runtime.keep_steps)
    for error in unusable:
        notice(f"{error}; until then, no run or checkpoint is removed, since this plan may need it")
    for run in started:
        provenance = run.provenance() or {}
        parent = _identity(run).get("parent")
        if isinstance(parent, dict) and provenance.get("parent"):
            needed.setdefault(Path(provenance["parent"]).name, set()).add(int(parent["step"]))
    return None if unusable else (needed, planned)


def _identity(run: RunFolder) -> dict[str, Any]:
    made_of = (run.provenance() or {}).get("identity")
    return made_of if isinstance(made_of, dict) else {}


def remove(item: Item) -> bool:
    """Remove an item, and tell whether it was removed.

    It is kept if another process uses its run, or if it is the last intact checkpoint of its run.
    """
    try:
        with leased(item.run.path) if item.run else contextlib.nullcontext():
            if item.run and item.kind == "checkpoints" and not _has_later_checkpoint(item.run, item.path):
                notice(f"{item.path} is not removed: no later checkpoint is intact")
                return False
            if not item.path.is_dir():
                item.path.unlink()
            elif item.path.name.startswith("."):
                shutil.rmtree(item.path)
            else:
                remove_folder(item.path)
    except Held as error:
        notice(f"{error}: {item.path.name} is not removed")
        return False
    return True


def _has_later_checkpoint(run: RunFolder, path: Path) -> bool:
    """Tell whether a run has an intact checkpoint that is newer than the checkpoint at `path`."""
    for later in reversed(checkpoints.steps(run.checkpoints).values()):
        if later == path:
            return False
        try:
            checkpoints.load(later)
            return True
        except checkpoints.DamagedCheckpoint as error:
            notice(error)
    return False
