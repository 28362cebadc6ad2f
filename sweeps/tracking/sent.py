"""Remember what was sent to MLflow about a store's sweeps, and find what MLflow does not have yet.

A small cache file beside the run folders holds, for each sweep and trial, what was sent and the times and sizes of the
trial's files at that moment, and those of MLflow's SQLite file. While these are the same there is nothing to do, and
MLflow is not even imported. The cache may be deleted; then MLflow is asked which runs it has.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fewbits.common.atomic import read_json, write_json
from fewbits.common.from_dict import from_dict
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.tracking import sqlite_database
from fewbits.experiments.tracking.owner import Owner
from fewbits.experiments.tracking.system_metrics import SYSTEM
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.planning.sweep import Sweep
from fewbits.sweeps.running import store
from fewbits.sweeps.running.store import State
from fewbits.sweeps.tracking.comparison import compared, view_state

CACHE = ".mlflow-sync.json"
FILES = ("config.yaml", "metrics.parquet", "timing.parquet", "result.json", store.FAILURE, SYSTEM)

Look = list[Any]  # a trial's state, then the modification time and the size of each of its files


def look_at(folder: RunFolder) -> Look:
    """Return a trial's current state, and the times and sizes of its files."""
    return [store.state(folder).value, *(look_at_file(folder.path / name) for name in FILES)]


def look_at_file(path: Path) -> list[int] | None:
    """Return a file's modification time and size, or None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size]


def look_at_database(uri: str) -> list[int] | None:
    """Return the time and size of MLflow's SQLite file, or None if MLflow is a server or another database."""
    return look_at_file(sqlite_database.path_of(uri)) if uri.startswith(sqlite_database.SCHEME) else None


def place_of(cell: Cell) -> str:
    """Return the cell's place as JSON, which is the value of a run's tag."""
    return json.dumps(cell.place)


@dataclass
class SentTrial:
    """The data of a sweep's trial that were last sent to MLflow. The cache file has these fields."""

    folder: str
    run: str = ""  # its id in MLflow
    place: str = ""
    current: bool = False
    look: Look = field(default_factory=list)


@dataclass
class SentSweep:
    """The data of a sweep at a scale that were last sent to MLflow. The cache file has these fields."""

    experiment: str
    parent: str  # the run
    status: str = ""  # of the parent
    view: str = ""
    children: dict[str, SentTrial] = field(default_factory=dict)  # by trial

    def orphans(self, want: WantedSweep | None, runs: Path) -> list[RunFolder]:
        """Return the run folders of trials that MLflow shows as running, but that do not run and are not in `want`.

        The store may be mounted elsewhere than when a folder was sent, so only the folder's name counts.
        """
        shown = [trial for trial, child in self.children.items() if child.look[0] == State.RUNNING]
        folders = [RunFolder(runs / Path(self.children[trial].folder).name, trial) for trial in shown]
        unwanted = [folder for folder in folders if not (want and folder.id in want.cells)]
        return [folder for folder in unwanted if store.state(folder) is not State.RUNNING]


@dataclass
class SentReport:
    """The report of a study at a scale that `fewbits report` wrote. The cache file has these fields."""

    folder: str
    look: list[int] | None = None  # the time and size of its page when it was sent

    @property
    def unsent(self) -> list[int] | None:
        """The time and size of its page, if MLflow does not have it yet."""
        now = look_at_file(Path(self.folder) / "index.html")
        return None if now == self.look else now


@dataclass
class SentStore:
    """The data of a store and user that were last sent to an MLflow. The cache file has these fields."""

    sweeps: dict[str, SentSweep] = field(default_factory=dict)
    reports: dict[str, SentReport] = field(default_factory=dict)  # by STUDY/SCALE
    database: list[int] | None = None  # the time and size of MLflow's SQLite file after the last write


@dataclass(frozen=True)
class WantedSweep:
    """The current state of a sweep at a scale, from the plan and the store."""

    sweep: Sweep
    owner: Owner
    cells: dict[str, Cell]  # by trial: the first, if several cells are one trial
    looks: dict[str, Look]
    status: str  # MLflow's, of the parent run
    metrics: tuple[str, ...] = ()  # of numerics, that the comparison view shows

    @property
    def view(self) -> str:
        rows = {compared(self.sweep, cell): None for cell in self.cells.values()}
        return view_state(self.sweep, list(rows), self.owner, self.metrics)

    def unsent(self, sent: SentSweep) -> list[str]:
        """Return the ids of trials whose current state MLflow lacks.

        Trials that have not begun are left out, unless MLflow shows them as running.
        """
        trials = []
        for trial, cell in self.cells.items():
            look, child = self.looks[trial], sent.children.get(trial)
            begun = look[0] != State.PLANNED or look[1] is not None
            removed = child is not None and child.look[0] == State.RUNNING  # it is shown as running
            state = (look, True, place_of(cell))
            if (begun or removed) and (child is None or (child.look, child.current, child.place) != state):
                trials.append(trial)
        return trials

    def is_sent(self, sent: SentSweep | None) -> bool:
        """Tell whether MLflow has the current state of the sweep and all its trials."""
        return sent is not None and (sent.status, sent.view) == (self.status, self.view) and not self.unsent(sent)


def read_sent(runs: Path, uri: str, owner: Owner) -> SentStore:
    """Return the cache's record of what was sent to MLflow for this store and user."""
    cached = (read_json(runs / CACHE) or {}).get(owner.cache_key(uri))
    try:
        sent = from_dict(SentStore, cached or {})
    except (ValueError, AttributeError):  # damaged, or of an earlier version
        return SentStore()
    complete = all(child.look for sweep in sent.sweeps.values() for child in sweep.children.values())
    return sent if complete else SentStore()


def write_sent(runs: Path, uri: str, owner: Owner, sent: SentStore) -> None:
    """Write the cache."""
    others = {
        key: value for key, value in (read_json(runs / CACHE) or {}).items() if "://" not in key
    }  # once keys were URIs
    write_json(runs / CACHE, {**others, owner.cache_key(uri): asdict(sent)})
