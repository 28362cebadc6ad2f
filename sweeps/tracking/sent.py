"""Record in a cache file what was sent to MLflow about a store's sweeps, and find what MLflow does not have yet.

The cache file in the store has, for each sweep and trial, what was sent and the modification times and sizes that the
trial's files had then. It also has the time and size of MLflow's SQLite file. As long as all of these are unchanged,
there is nothing to send, and MLflow is not even imported. The cache file may be deleted: then the next update reads
from MLflow which runs it has.
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

Look = list[Any]  # [a trial's state, then for each of FILES: [modification time in ns, size in bytes] or None]


def look_at(folder: RunFolder) -> Look:
    """Return a trial's present state, and the modification time and size of each of those files that FILES names.

    A result that differs from an earlier one shows that the trial has changed in the meantime.
    """
    return [store.state(folder).value, *(look_at_file(folder.path / name) for name in FILES)]


def look_at_file(path: Path) -> list[int] | None:
    """Return a file's modification time in nanoseconds and its size in bytes, or None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_mtime_ns, status.st_size]


def look_at_database(uri: str) -> list[int] | None:
    """Return the modification time and size of MLflow's SQLite file; None if it is missing or `uri` names none."""
    return look_at_file(sqlite_database.path_of(uri)) if uri.startswith(sqlite_database.SCHEME) else None


def place_of(cell: Cell) -> str:
    """Return the cell's place (arm, axes, seed) as JSON: the value of the tag `fewbits.place` of the trial's run."""
    return json.dumps(cell.place)


@dataclass
class SentTrial:
    """A record in the cache file: what was last sent to MLflow about a trial of a sweep."""

    folder: str  # the path of the run folder
    run: str = ""  # the id of its run in MLflow
    place: str = ""  # the trial's place in the sweep, as JSON
    current: bool = False  # the newest plan has this trial at its place
    look: Look = field(default_factory=list)  # the state and files that were sent


@dataclass
class SentSweep:
    """A record in the cache file: what was last sent to MLflow about a sweep at a scale."""

    experiment: str  # the experiment's id in MLflow
    parent: str  # the id of the sweep's run in MLflow, the parent of its trials' runs
    status: str = ""  # MLflow's status of the parent run
    view: str = ""  # the comparison view, as the value of its tag
    children: dict[str, SentTrial] = field(default_factory=dict)  # by trial id

    def orphans(self, want: WantedSweep | None, runs: Path) -> list[RunFolder]:
        """Return the run folders of trials that MLflow still shows as running, but that have stopped.

        Trials of the current plan are left out, since `WantedSweep.unsent` finds them. want: the sweep in the current
        plan; None: the plan does not have the sweep. runs: the store. Only the names of the recorded folders are used,
        since the store may have been mounted at another path when they were recorded.
        """
        shown = [trial for trial, child in self.children.items() if child.look[0] == State.RUNNING]
        folders = [RunFolder(runs / Path(self.children[trial].folder).name, trial) for trial in shown]
        unwanted = [folder for folder in folders if not (want and folder.id in want.cells)]
        return [folder for folder in unwanted if store.state(folder) is not State.RUNNING]


@dataclass
class SentReport:
    """A record in the cache file: a report that `fewbits report` wrote for a study at a scale."""

    folder: str  # the report's folder
    look: list[int] | None = None  # the time and size of index.html when the report was last sent; None: never sent

    @property
    def unsent(self) -> list[int] | None:
        """The present modification time and size of the report's index.html, if the report has to be sent, else None.

        It has to be sent if index.html exists and these two numbers differ from those when it was last sent.
        """
        now = look_at_file(Path(self.folder) / "index.html")
        return None if now == self.look else now


@dataclass
class SentStore:
    """The records in the cache file for one MLflow server or database and one owner (a store and a user)."""

    sweeps: dict[str, SentSweep] = field(default_factory=dict)  # by STUDY/NAME/SCALE
    reports: dict[str, SentReport] = field(default_factory=dict)  # by STUDY/SCALE
    database: list[int] | None = None  # the time and size of MLflow's SQLite file after the last write


@dataclass(frozen=True)
class WantedSweep:
    """The state of a sweep at a scale that MLflow should show, from the plan and the store."""

    sweep: Sweep
    owner: Owner
    cells: dict[str, Cell]  # by trial id; if several cells have the same trial, the first cell
    looks: dict[str, Look]  # by trial id: the present state and files of all trials of the plan
    status: str  # MLflow's status for the parent run
    metrics: tuple[str, ...] = ()  # metrics that the comparison view shows besides the losses

    @property
    def view(self) -> str:
        rows = {compared(self.sweep, cell): None for cell in self.cells.values()}
        return view_state(self.sweep, list(rows), self.owner, self.metrics)

    def unsent(self, sent: SentSweep) -> list[str]:
        """Return the ids of trials whose present state was not sent yet. sent: the record of what was sent.

        Trials that have not started are left out, except those that MLflow shows as running.
        """
        trials = []
        for trial, cell in self.cells.items():
            look, child = self.looks[trial], sent.children.get(trial)
            begun = look[0] != State.PLANNED or look[1] is not None
            removed = child is not None and child.look[0] == State.RUNNING  # shown as running; its folder may be gone
            state = (look, True, place_of(cell))
            if (begun or removed) and (child is None or (child.look, child.current, child.place) != state):
                trials.append(trial)
        return trials

    def is_sent(self, sent: SentSweep | None) -> bool:
        """Tell whether, according to the record `sent`, MLflow has the present state of the sweep and its trials."""
        return sent is not None and (sent.status, sent.view) == (self.status, self.view) and not self.unsent(sent)


def read_sent(runs: Path, uri: str, owner: Owner) -> SentStore:
    """Return the cache file's record for the MLflow at `uri` and this owner (a store and a user).

    If the record is missing or damaged, return an empty one.
    """
    cached = (read_json(runs / CACHE) or {}).get(owner.cache_key(uri))
    try:
        sent = from_dict(SentStore, cached or {})
    except (ValueError, AttributeError):  # the file is damaged, or an older version of fewbits wrote it
        return SentStore()
    complete = all(child.look for sweep in sent.sweeps.values() for child in sweep.children.values())
    return sent if complete else SentStore()


def write_sent(runs: Path, uri: str, owner: Owner, sent: SentStore) -> None:
    """Write the record `sent` for the MLflow at `uri` and this owner into the cache file.

    Keep the records of other owners, and of other MLflow servers and databases.
    """
    # Older versions used URIs as keys; their records are dropped.
    others = {key: value for key, value in (read_json(runs / CACHE) or {}).items() if "://" not in key}
    write_json(runs / CACHE, {**others, owner.cache_key(uri): asdict(sent)})
