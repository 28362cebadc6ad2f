"""Show a plan's trials in MLflow: a view of the store's files, which drivers update and `fewbits sync` can rebuild.

    experiment   a study
    parent run   a sweep at a scale, per store and user   tags fewbits.sweep, fewbits.scale
    child run    a trial of that sweep that has started   tags fewbits.trial, .folder, .state, .place, .current, .reason

All runs have the tags fewbits.store, fewbits.user and mlflow.user. A driver creates, changes and deletes only runs of
its own store and user. Runs of versions without these tags are adopted if their folder is in the store.

Only drivers connect to MLflow, workers never do. A small cache file beside the run folders holds what was sent, with
the times and sizes of the trials' files at that moment. While these are the same there is nothing to do, and MLflow is
not even imported. The cache may be deleted; then MLflow is asked which runs it has. If MLflow shows a run as running
whose trial nobody works on, the run is set to KILLED; when the trial resumes, the same run is set to RUNNING. If
several trials have the same place in a sweep, for example after a change of the code, the newest plan's trial is
current, and the comparison view shows only current trials.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.common.atomic import write_json
from fewbits.common.redaction import redacted
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.tracking import mlflow_database, mlflow_runs
from fewbits.experiments.tracking import tracker as tracking
from fewbits.experiments.tracking.mlflow_runs import FOLDER, TRIAL
from fewbits.experiments.tracking.owner import STORE, Owner, owner_of
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.sweep import Sweep
from fewbits.sweeps.running import store
from fewbits.sweeps.running.store import State
from fewbits.sweeps.running.trial_status import trial_statuses
from fewbits.sweeps.tracking import comparison
from fewbits.sweeps.tracking.comparison import (
    COMPARED,
    CURRENT,
    SCALE,
    SWEEP,
    TAG,
    View,
    compared,
    group_of,
    view_of,
    view_state,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

CACHE = ".mlflow-sync.json"
STATE, PLACE, REASON = "fewbits.state", "fewbits.place", "fewbits.reason"
PARENT, SOURCE, NOTE = "mlflow.parentRunId", "mlflow.source.name", "mlflow.note.content"
KIND = "fewbits.kind"  # a tag of parent runs: sweep
FILES = ("config.yaml", "metrics.parquet", "timing.parquet", "result.json", store.FAILURE)
STATUS = {
    State.PLANNED: "KILLED",  # it has started, and nobody works on it
    State.RUNNING: "RUNNING",
    State.DONE: "FINISHED",
    State.FAILED: "FAILED",
    State.DIVERGED: "FAILED",
}
Look = list[Any]  # a trial's state, then the modification time and the size of each of its files


@dataclass(frozen=True)
class Synced:
    """The result of an update of MLflow."""

    uri: str
    views: tuple[View, ...]  # of the sweeps that MLflow has runs of
    sent: int  # runs that were created or changed
    away: bool  # MLflow did not get everything
    runs: Path | None = field(default=None, compare=False)  # the store

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """The names and URLs of the comparison views; without a server, at the address of `fewbits ui`."""
        base = _without_user(self.uri) if self.uri.startswith("http") else comparison.UI
        return tuple((view.name, view.link(base)) for view in self.views)

    @property
    def lines(self) -> list[str]:
        """The links as lines, and the command that serves them if there is no server."""
        links = [f"{name}: {link}" for name, link in self.links]
        return [*links, self._served] if links and self._served else links

    @property
    def _served(self) -> str:
        """The line that names the `fewbits ui` command; empty if a server has the runs."""
        if self.uri.startswith("http"):
            return ""
        runs = self.runs or mlflow_database.path_of(self.uri).parent
        default = os.environ.get("MLFLOW_TRACKING_URI") or runs == Path("runs").resolve()
        shown = runs.relative_to(Path.cwd()) if runs.is_relative_to(Path.cwd()) else runs
        return f"(served by `fewbits ui{'' if default else f' --runs {shlex.quote(str(shown))}'}`)"


@dataclass
class _Child:
    """The last state of a trial of a sweep that MLflow was sent. The cache file has these fields."""

    folder: str
    run: str = ""  # its id in MLflow
    place: str = ""
    current: bool = False
    look: Look = field(default_factory=list)


@dataclass
class _Group:
    """The last state of a sweep at a scale that MLflow was sent. The cache file has these fields."""

    experiment: str
    parent: str  # the run
    status: str = ""  # of the parent
    view: str = ""
    children: dict[str, _Child] = field(default_factory=dict)  # by trial


@dataclass(frozen=True)
class _Wanted:
    """The current state of a sweep at a scale, from the plan and the store."""

    sweep: Sweep
    owner: Owner
    cells: dict[str, Cell]  # by trial: the first, if several cells are one trial
    looks: dict[str, Look]
    status: str

    @property
    def view(self) -> str:
        rows = {compared(self.sweep, cell): None for cell in self.cells.values()}
        return view_state(self.sweep, list(rows), self.owner)


class Mirror:
    """The view of one plan in MLflow. `sync` may be called from any thread; each error is reported once."""

    def __init__(self, plan: Plan, uri: str | None = None) -> None:
        self._plan = plan
        self._runs = next(iter(plan.trials.values())).folder.path.parent
        self.uri = uri or tracking.tracking_uri(self._runs)
        self._patience = tracking.Patience()
        self._client: MlflowClient | None = None
        self._owner: Owner | None = None

    def sync(self, *, afresh: bool = False, last: bool = False) -> Synced:
        """Send to MLflow what has changed.

        last: no driver runs the plan any more. afresh: ask MLflow what it has, instead of the cache file.
        """
        with self._patience.guarding("trials go on"):
            self._owner = self._owner or owner_of(self._runs)
        if self._owner is None:  # the store has no id, and cannot be written
            return Synced(self.uri, (), 0, True, self._runs)
        owner = self._owner
        groups = _read(self._runs, self.uri, owner)
        wanted = self._wanted(last or afresh, owner)
        sent, away = 0, afresh or _has_changed(wanted, groups, self._runs)
        if away and (last or afresh or self._patience.over):
            with self._patience.guarding("trials go on"):
                client, self._client = self._client or self._connect(), None
                with tracking.locked(self._runs):
                    groups = _read(self._runs, self.uri, owner)
                    if afresh:
                        groups = {key: group for key, group in groups.items() if key not in wanted}
                    try:
                        sent = self._update(client, owner, wanted, groups)
                        sent += tracking.reap(client, self._runs) if afresh else 0
                    finally:
                        _write(self._runs, self.uri, owner, groups)
                self._client, away = client, False  # after an error the next attempt connects again
        views = [view_of(want.sweep, groups[key].experiment, owner) for key, want in wanted.items() if key in groups]
        return Synced(self.uri, tuple(views), sent, away, self._runs)

    def _connect(self) -> MlflowClient:
        self._runs.mkdir(parents=True, exist_ok=True)
        return tracking.connect(self._runs, self.uri)

    def _wanted(self, over: bool, owner: Owner) -> dict[str, _Wanted]:
        blocked_keys = (key for key, status in trial_statuses(self._plan).items() if status.state is State.BLOCKED)
        blocked = dict.fromkeys(blocked_keys, State.BLOCKED)
        looks = {trial: _look(planned.folder) for trial, planned in self._plan.trials.items()}
        wanted = {}
        for sweep in self._plan.sweeps:
            cells: dict[str, Cell] = {}
            for member in self._plan.members:
                if (member.study, member.cell.sweep, member.scale) == (sweep.study, sweep.name, sweep.scale):
                    cells.setdefault(member.id, member.cell)
            if cells:
                status = _status([blocked.get(trial, State(looks[trial][0])) for trial in cells], over)
                wanted[group_of(sweep)] = _Wanted(sweep, owner, cells, looks, status)
        return wanted

    def _update(
        self, client: MlflowClient, owner: Owner, wanted: Mapping[str, _Wanted], groups: dict[str, _Group]
    ) -> int:
        sent = 0
        for key, want in wanted.items():
            group = groups.get(key) or self._ask(client, owner, want.sweep)
            groups.pop(key, None)  # until all is sent: after an error MLflow is asked again what it has
            if group.view != want.view:
                key_of_view = view_of(want.sweep, group.experiment, owner).key
                client.set_experiment_tag(group.experiment, TAG + key_of_view, want.view)
                group.view = want.view
            for trial in _new(want, group, self._runs):
                self._send_child(client, want, group, trial)
                sent += 1
            if group.status != want.status:
                client.update_run(group.parent, status=want.status)
                group.status = want.status
            groups[key] = group
        return sent + sum(self._reap(client, group, wanted.get(key)) for key, group in groups.items())

    def _ask(self, client: MlflowClient, owner: Owner, sweep: Sweep) -> _Group:
        """Return what MLflow has of a sweep of this owner; create its experiment and parent run if they are missing."""
        experiment = tracking.experiment(client, sweep.study, self._runs, self.uri)
        key = {SWEEP: sweep.name, SCALE: sweep.scale}
        note = {"mlflow.note.content": sweep.about} if sweep.about else {}
        name = f"{sweep.name} {sweep.scale}"
        adopted = mlflow_runs.adopt(client, experiment, owner, self._runs, key)
        if adopted:
            self._adopt_parent(client, experiment, owner, key)
        parent = mlflow_runs.one_run(client, experiment, owner, {**key, KIND: "sweep"}, name, note, time.time())
        for run in adopted:
            client.set_tag(run.info.run_id, PARENT, parent.info.run_id)
        group = _Group(experiment, parent.info.run_id)
        for run in mlflow_runs.search(client, experiment, {**key, **owner.key}):
            tags = run.data.tags
            if TRIAL not in tags:
                continue
            child = _Child(tags.get(FOLDER, ""), run.info.run_id, tags.get(PLACE, ""), tags.get(CURRENT) == "yes")
            child.look = [tags.get(STATE, State.RUNNING)]
            if tags[TRIAL] in group.children:
                client.delete_run(child.run)
            else:
                group.children[tags[TRIAL]] = child
        return group

    def _adopt_parent(self, client: MlflowClient, experiment: str, owner: Owner, key: Mapping[str, str]) -> None:
        """Tag a parent run that has no owner, if all its children belong to this owner now."""
        runs = mlflow_runs.search(client, experiment, key)
        for parent in runs:
            children = [run for run in runs if run.data.tags.get(PARENT) == parent.info.run_id]
            if STORE not in parent.data.tags and children and all(owner.owns(run.data.tags) for run in children):
                mlflow_runs.take(client, parent, owner)

    def _send_child(self, client: MlflowClient, want: _Wanted, group: _Group, trial: str) -> None:
        cell, folder, look = want.cells[trial], self._plan.trials[trial].folder, want.looks[trial]
        place = json.dumps(cell.place)
        child = group.children.get(trial)
        if child is not None and child.place != place:  # its place has changed, but MLflow's parameters cannot change
            client.delete_run(child.run)
            child = None
        run = self._begin(client, want, group, trial) if child is None else client.get_run(child.run)
        child = child or group.children.setdefault(trial, _Child(str(folder.path), run.info.run_id, place))
        of_trial = self._plan.trials[trial].trial
        params = {
            **tracking.about(of_trial),
            **cell.place,
            COMPARED: compared(want.sweep, cell) or of_trial.recipe.name,
        }
        _send(client, run, folder, State(look[0]), params)
        for other in group.children.values():
            if other.place == place and other.current and other is not child:
                client.set_tag(other.run, CURRENT, "no")
                other.current = False
        child.folder, child.current, child.look = str(folder.path), True, look

    def _begin(self, client: MlflowClient, want: _Wanted, group: _Group, trial: str) -> Run:
        cell, folder = want.cells[trial], self._plan.trials[trial].folder
        key = {SWEEP: want.sweep.name, SCALE: want.sweep.scale, TRIAL: trial}
        tags = {PARENT: group.parent, PLACE: json.dumps(cell.place), SOURCE: "fewbits sweep"}
        tags |= {tag: value for tag, value in _tags(folder, State(want.looks[trial][0])).items() if value}
        name = ", ".join(f"{key} {value}" for key, value in cell.place.items())
        alone = self.uri.startswith("sqlite")  # the store's lock prevents other drivers from creating the run too
        make = mlflow_runs.new_run if alone else mlflow_runs.one_run
        return make(client, group.experiment, want.owner, key, name, {**tags, CURRENT: "yes"}, tracking.began(folder))

    def _reap(self, client: MlflowClient, group: _Group, want: _Wanted | None) -> int:
        """Update runs that are shown as running, of trials that the plan does not have; return their number."""
        orphans = _orphans(group, want, self._runs)
        for folder in orphans:
            child = group.children[folder.id]
            look = _look(folder)
            _send(client, client.get_run(child.run), folder, State(look[0]), {})
            child.look = look
        return len(orphans)


def _send(client: MlflowClient, run: Run, folder: RunFolder, state: State, params: Mapping[str, str]) -> None:
    tags = {**_tags(folder, state), **({CURRENT: "yes"} if params else {})}
    tracking.send(client, run, folder, STATUS[state], params, tags)


def _tags(folder: RunFolder, state: State) -> dict[str, str | None]:
    reason, note = _reason(folder, state)
    return {STATE: state.value, FOLDER: str(folder.path), REASON: reason, NOTE: note}


def _reason(folder: RunFolder, state: State) -> tuple[str | None, str | None]:
    """Return the reason of a divergence or failure in one line, and as a note with the log; None without a reason."""
    if state is State.DIVERGED:
        text = f"diverged at step {(folder.result() or {})['step']}"
        return text, text
    failure = store.failure(folder) if state is State.FAILED else None
    if failure is None:
        return None, None
    log = "\n".join(failure.log)
    return failure.reason, f"{failure.reason}\n\n```\n{log}\n```"


# ------------------------------------------------------------------------------------------------ changes


def _look(folder: RunFolder) -> Look:
    look: Look = [store.state(folder).value]
    for name in FILES:
        try:
            status = (folder.path / name).stat()
            look.append([status.st_mtime_ns, status.st_size])
        except OSError:
            look.append(None)
    return look


def _began(look: Look) -> bool:
    return look[0] != State.PLANNED or look[1] is not None


def _status(states: list[State], over: bool) -> str:
    """Return MLflow's status of a sweep. over: no driver runs it any more."""
    if State.RUNNING in states:
        return "RUNNING"
    if State.PLANNED in states and not over:
        return "RUNNING"
    if State.FAILED in states or State.BLOCKED in states:
        return "FAILED"
    return "KILLED" if State.PLANNED in states else "FINISHED"


def _new(want: _Wanted, group: _Group, runs: Path) -> list[str]:
    """Return the trials whose current state MLflow does not have."""
    sent = group.children
    return [
        trial
        for trial, cell in want.cells.items()
        if (_began(want.looks[trial]) or _removed(sent.get(trial), runs))
        and (
            trial not in sent
            or sent[trial].look != want.looks[trial]
            or not sent[trial].current
            or sent[trial].place != json.dumps(cell.place)
        )
    ]


def _removed(child: _Child | None, runs: Path) -> bool:
    """Tell whether MLflow shows a trial as running whose folder does not exist any more."""
    return child is not None and child.look[0] == State.RUNNING


def _has_changed(wanted: Mapping[str, _Wanted], groups: Mapping[str, _Group], runs: Path) -> bool:
    for key, want in wanted.items():
        group = groups.get(key)
        if group is None or group.status != want.status or group.view != want.view or _new(want, group, runs):
            return True
    return any(_orphans(group, wanted.get(key), runs) for key, group in groups.items())


def _orphans(group: _Group, want: _Wanted | None, runs: Path) -> list[RunFolder]:
    """Return the trials of this store that MLflow shows as running, but that do not run and are not in the plan.

    The store may be mounted elsewhere than when a folder was written to the cache, so only the folder's name counts.
    """
    children = {RunFolder(runs / Path(child.folder).name, trial): child for trial, child in group.children.items()}
    return [
        folder
        for folder, child in children.items()
        if child.look[0] == State.RUNNING
        and not (want and folder.id in want.cells)
        and store.state(folder) is not State.RUNNING
    ]


# ------------------------------------------------------------------------------------------------ the cache file


def _read(runs: Path, uri: str, owner: Owner) -> dict[str, _Group]:
    try:
        cached = json.loads((runs / CACHE).read_text())[owner.cache_key(uri)]
        groups = {key: _Group(**group) for key, group in cached.items()}
        for group in groups.values():
            group.children = {trial: _Child(**child) for trial, child in group.children.items()}  # type: ignore[arg-type]
        if not all(child.look for group in groups.values() for child in group.children.values()):
            return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return _still_there(uri, groups) if uri.startswith(mlflow_database.SCHEME) else groups


def _write(runs: Path, uri: str, owner: Owner, groups: Mapping[str, _Group]) -> None:
    try:
        cached = json.loads((runs / CACHE).read_text())
        cached = {key: value for key, value in cached.items() if "://" not in key}  # earlier versions wrote URIs here
    except (OSError, ValueError, AttributeError):
        cached = {}
    write_json(runs / CACHE, {**cached, owner.cache_key(uri): {key: asdict(group) for key, group in groups.items()}})


def _without_user(uri: str) -> str:
    """Return a server's address without user and password, since a browser asks for them."""
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return redacted(f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}")


def _still_there(uri: str, groups: dict[str, _Group]) -> dict[str, _Group]:
    """Return the groups that the database still has: it may be new, or a user may have deleted runs."""
    path = mlflow_database.path_of(uri)
    if not path.exists():
        return {}
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute("select run_uuid from runs where lifecycle_stage = 'active'")
            active = {run for (run,) in rows}
    except sqlite3.Error:
        return {}
    return {key: group for key, group in groups.items() if group.parent in active}
