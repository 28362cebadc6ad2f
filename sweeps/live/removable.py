"""Find what can be removed from a store, and remove it without harming trials that run and branches to come."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fewbits.common.atomic import remove_folder
from fewbits.common.terminal import notice
from fewbits.experiments.identity import computed_by_todays_sources
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import Busy, RunFolder, opened
from fewbits.sweeps.live.disk_space import bytes_below
from fewbits.sweeps.planning.replacing import FOLDER as REPLACED
from fewbits.sweeps.planning.stored_plans import UnusablePlan, stored_plans
from fewbits.sweeps.running import store

OLD = 3600.0  # seconds after which no process still writes an unfinished file of the store itself


@dataclass(frozen=True)
class Item:
    """A file or folder that can be removed."""

    kind: str
    path: Path
    run: RunFolder | None = None  # the run that it is a part of

    @property
    def bytes(self) -> int:
        return bytes_below(self.path) if self.path.is_dir() else self.path.stat().st_size


def removable(runs: Path) -> Iterator[Item]:
    """Yield what can be removed from a store, without that of trials that run."""
    started = [*_started(runs)]
    needs = _needs(runs, started)
    for run in started:
        if store.holder(run) is not None:
            continue
        for folder in (run.path, run.checkpoints, run.kept):
            yield from (Item("leftovers", file, run) for file in sorted(folder.glob(".*.partial")))
        if needs is None or not _has_ended(run):
            continue
        needed, planned = needs
        if run.path.name not in planned and run.path.name not in needed and _is_stale(run):
            yield Item("stale", run.path, run)
        else:
            older = [*checkpoints.steps(run.checkpoints).items()][:-1]
            steps = needed.get(run.path.name, set())
            yield from (Item("checkpoints", folder, run) for step, folder in older if step not in steps)
    for file in sorted(runs.glob(".*.partial")):
        if time.time() - file.stat().st_mtime > OLD:
            yield Item("leftovers", file)
    yield from (Item("replaced", folder) for folder in sorted((runs / REPLACED).glob("*")))


def _started(runs: Path) -> Iterator[RunFolder]:
    """Yield the runs of a store; a line names each one that cannot be read."""
    for path in sorted(runs.glob("*/provenance.json")):
        try:
            yield opened(path.parent)
        except (OSError, ValueError) as error:
            notice(f"{error}; {path.parent.name} is left out")


def _has_ended(run: RunFolder) -> bool:
    """Tell whether a run has an intact result: one that is damaged has to be repaired from the checkpoints."""
    try:
        return run.result() is not None
    except ValueError:
        return False


def _needs(runs: Path, started: Sequence[RunFolder]) -> tuple[dict[str, set[int]], set[str]] | None:
    """Return the steps from which branches start, by run folder, and the run folders of stored plans.

    Return None if a plan cannot be read, since it may need any run.
    """
    needed: dict[str, set[int]] = {}
    planned: set[str] = set()
    unusable: list[UnusablePlan] = []
    for stored in stored_plans(runs, unusable.append):
        for trial in stored.plan.trials.values():
            planned.add(trial.folder.path.name)
            needed.setdefault(trial.folder.path.name, set()).update(trial.keep, trial.runtime.keep_steps)
    for error in unusable:
        notice(f"{error}: runs and checkpoints that it may need are kept; run its sweep again, or remove the file")
    for run in started:
        provenance = run.provenance() or {}
        parent = (provenance.get("identity") or {}).get("parent")
        if parent and provenance.get("parent"):
            needed.setdefault(Path(provenance["parent"]).name, set()).add(int(parent["step"]))
    return None if unusable else (needed, planned)


def _is_stale(run: RunFolder) -> bool:
    return not computed_by_todays_sources(run.provenance() or {})


def remove(item: Item) -> bool:
    """Remove an item, and tell whether it is gone.

    Parts of a run that another process uses are kept, and so is a run's last intact checkpoint.
    """
    try:
        if item.run is None:
            _discard(item.path)
        else:
            with item.run.alone():
                if item.kind == "checkpoints" and not _has_later_checkpoint(item.run, item.path):
                    notice(f"{item.path} is not removed: no later checkpoint is intact")
                    return False
                _discard(item.path)
    except Busy as error:
        notice(f"{error}: {item.path.name} is not removed")
        return False
    return True


def _has_later_checkpoint(run: RunFolder, path: Path) -> bool:
    """Tell whether a run has an intact checkpoint that is newer than the one at the path."""
    for later in reversed(checkpoints.steps(run.checkpoints).values()):
        if later == path:
            return False
        try:
            checkpoints.load(later)
        except checkpoints.DamagedCheckpoint as error:
            notice(error)
        else:
            return True
    return False


def _discard(path: Path) -> None:
    if path.name.startswith(".") and path.is_dir():
        shutil.rmtree(path)
    elif path.is_dir():
        remove_folder(path)
    else:
        path.unlink()
