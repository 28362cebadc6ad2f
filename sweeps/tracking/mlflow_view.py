"""A plan's trials in MLflow: a view of the store's files that a driver keeps up to date and anybody can make again.

    experiment   a study
    parent run   a sweep at a scale, per store and user   tags fewbits.sweep, fewbits.scale
    child run    a trial of that sweep, once it began     tags fewbits.trial, .folder, .state, .place, .current, .reason

All runs have the tags fewbits.store, fewbits.user and mlflow.user, and a driver creates, changes and deletes only runs
of its own store and user. Runs of versions without these tags are adopted if their folder lies in the store.

Drivers alone talk to MLflow, workers never do. What was sent lies in a small file beside the run folders, by what the
trials' files looked like then: while they look the same there is nothing to do, and MLflow is not even imported. The
file may be deleted; then MLflow is asked what it has. A run that MLflow believes to be running while nobody holds its
trial's lease is set to KILLED, and to RUNNING when the trial goes on, in the same run. Of trials that have the same
place in a sweep, with other code say, the newest plan's is current; the comparison view shows these alone.
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
from fewbits.experiments.runs.run_folder import RunFolder
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
    State.PLANNED: "KILLED",  # it began, and nobody is at it
    State.RUNNING: "RUNNING",
    State.DONE: "FINISHED",
    State.FAILED: "FAILED",
    State.DIVERGED: "FAILED",
}
Look = list[Any]  # a trial's state, then when its files were changed and how long they are


@dataclass(frozen=True)
class Synced:
    uri: str
    views: tuple[View, ...]  # of the sweeps that MLflow has something of
    sent: int  # runs of which MLflow has been told something
    away: bool  # MLflow could not be told all
    runs: Path | None = field(default=None, compare=False)  # the store

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """To the comparison views, by name; without a server, as `fewbits ui` will serve them."""
        base = _without_user(self.uri) if self.uri.startswith("http") else comparison.UI
        return tuple((view.name, view.link(base)) for view in self.views)

    @property
    def lines(self) -> list[str]:
        """The links, and what has to run for them to lead somewhere."""
        links = [f"{name}: {link}" for name, link in self.links]
        return [*links, self._served] if links and self._served else links

    @property
    def _served(self) -> str:
        """Nothing more, of a server."""
        if self.uri.startswith("http"):
            return ""
        runs = self.runs or mlflow_database.path_of(self.uri).parent
        ours = os.environ.get("MLFLOW_TRACKING_URI") or runs == Path("runs").resolve()
        near = runs.relative_to(Path.cwd()) if runs.is_relative_to(Path.cwd()) else runs
        return f"(served by `fewbits ui{'' if ours else f' --runs {shlex.quote(str(near))}'}`)"


@dataclass
class _Child:
    """A trial of a sweep, as MLflow was told of it."""

    folder: str
    run: str = ""  # its id in MLflow
    place: str = ""
    current: bool = False
    look: Look = field(default_factory=list)


@dataclass
class _Group:
    """A sweep at a scale, as MLflow was told of it."""

    experiment: str
    parent: str  # the run
    status: str = ""  # of the parent
    view: str = ""
    children: dict[str, _Child] = field(default_factory=dict)  # by trial


@dataclass(frozen=True)
class _Wanted:
    """A sweep at a scale, as the plan has it and the store now looks."""

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
    """Of one plan. `sync` may be called from any thread, as often as one likes; what goes wrong is said once."""

    def __init__(self, plan: Plan, uri: str | None = None) -> None:
        self._plan = plan
        self._runs = next(iter(plan.trials.values())).folder.path.parent
        self.uri = uri or tracking.tracking_uri(self._runs)
        self._patience = tracking.Patience()
        self._client: MlflowClient | None = None
        self._owner: Owner | None = None

    def sync(self, *, afresh: bool = False, last: bool = False) -> Synced:
        """Tell MLflow what is new. last: no driver is at it any more; afresh: ask MLflow what it has."""
        with self._patience.guarding("trials go on"):
            self._owner = self._owner or owner_of(self._runs)
        if self._owner is None:  # a store that cannot be written, without an id
            return Synced(self.uri, (), 0, True, self._runs)
        owner = self._owner
        groups = _read(self._runs, self.uri, owner)
        wanted = self._wanted(last or afresh, owner)
        sent, away = 0, afresh or _news(wanted, groups, self._runs)
        if away and (last or afresh or self._patience.over):
            with self._patience.guarding("trials go on"):
                client, self._client = self._client or self._connect(), None
                with tracking.locked(self._runs):
                    groups = _read(self._runs, self.uri, owner)
                    if afresh:
                        groups = {key: group for key, group in groups.items() if key not in wanted}
                    try:
                        sent = self._tell(client, owner, wanted, groups)
                        sent += tracking.reap(client, self._runs) if afresh else 0
                    finally:
                        _write(self._runs, self.uri, owner, groups)
                self._client, away = client, False  # else the next attempt begins anew
        views = [view_of(want.sweep, groups[key].experiment, owner) for key, want in wanted.items() if key in groups]
        return Synced(self.uri, tuple(views), sent, away, self._runs)

    def _connect(self) -> MlflowClient:
        self._runs.mkdir(parents=True, exist_ok=True)
        return tracking.connect(self._runs, self.uri)

    def _wanted(self, over: bool, owner: Owner) -> dict[str, _Wanted]:
        found_blocked = (key for key, one in trial_statuses(self._plan).items() if one.state is State.BLOCKED)
        blocked = dict.fromkeys(found_blocked, State.BLOCKED)
        looks = {trial: _look(planned.folder) for trial, planned in self._plan.trials.items()}
        found = {}
        for sweep in self._plan.sweeps:
            cells: dict[str, Cell] = {}
            for member in self._plan.members:
                if (member.study, member.cell.sweep, member.scale) == (sweep.study, sweep.name, sweep.scale):
                    cells.setdefault(member.id, member.cell)
            if cells:
                status = _status([blocked.get(trial, State(looks[trial][0])) for trial in cells], over)
                found[group_of(sweep)] = _Wanted(sweep, owner, cells, looks, status)
        return found

    def _tell(
        self, client: MlflowClient, owner: Owner, wanted: Mapping[str, _Wanted], groups: dict[str, _Group]
    ) -> int:
        sent = 0
        for key, want in wanted.items():
            group = groups.get(key) or self._ask(client, owner, want.sweep)
            groups.pop(key, None)  # until all is said: what MLflow has lost is asked for again
            if group.view != want.view:
                key_of_view = view_of(want.sweep, group.experiment, owner).key
                client.set_experiment_tag(group.experiment, TAG + key_of_view, want.view)
                group.view = want.view
            for trial in _new(want, group, self._runs):
                self._tell_child(client, want, group, trial)
                sent += 1
            if group.status != want.status:
                client.update_run(group.parent, status=want.status)
                group.status = want.status
            groups[key] = group
        return sent + sum(self._reap(client, group, wanted.get(key)) for key, group in groups.items())

    def _ask(self, client: MlflowClient, owner: Owner, sweep: Sweep) -> _Group:
        """Return what MLflow has of a sweep of this owner; make its experiment and its parent run if need be."""
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
        """Tag a parent run without an owner, if all its children are the owner's by now."""
        found = mlflow_runs.search(client, experiment, key)
        for parent in found:
            children = [run for run in found if run.data.tags.get(PARENT) == parent.info.run_id]
            if STORE not in parent.data.tags and children and all(owner.owns(run.data.tags) for run in children):
                mlflow_runs.take(client, parent, owner)

    def _tell_child(self, client: MlflowClient, want: _Wanted, group: _Group, trial: str) -> None:
        cell, folder, look = want.cells[trial], self._plan.trials[trial].folder, want.looks[trial]
        place = json.dumps(cell.place)
        child = group.children.get(trial)
        if child is not None and child.place != place:  # what the sweep calls it has changed, and parameters cannot
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
        tags |= {tag: said for tag, said in _tags(folder, State(want.looks[trial][0])).items() if said}
        name = ", ".join(f"{key} {value}" for key, value in cell.place.items())
        alone = self.uri.startswith("sqlite")  # the store's lock keeps its other drivers from making it
        make = mlflow_runs.new_run if alone else mlflow_runs.one_run
        return make(client, group.experiment, want.owner, key, name, {**tags, CURRENT: "yes"}, tracking.began(folder))

    def _reap(self, client: MlflowClient, group: _Group, want: _Wanted | None) -> int:
        """Runs that were left running, of trials that the plan has not."""
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
    """In a line, and at length."""
    if state is State.DIVERGED:
        said = f"diverged at step {(folder.result() or {})['step']}"
        return said, said
    failure = store.failure(folder) if state is State.FAILED else None
    if failure is None:
        return None, None
    log = "\n".join(failure.log)
    return failure.reason, f"{failure.reason}\n\n```\n{log}\n```"


# ------------------------------------------------------------------------------------------------ what is new


def _look(folder: RunFolder) -> Look:
    looks: Look = [store.state(folder).value]
    for name in FILES:
        try:
            found = (folder.path / name).stat()
            looks.append([found.st_mtime_ns, found.st_size])
        except OSError:
            looks.append(None)
    return looks


def _began(look: Look) -> bool:
    return look[0] != State.PLANNED or look[1] is not None


def _status(states: list[State], over: bool) -> str:
    """Of a sweep; not over: a driver is at it."""
    if State.RUNNING in states:
        return "RUNNING"
    if State.PLANNED in states and not over:
        return "RUNNING"
    if State.FAILED in states or State.BLOCKED in states:
        return "FAILED"
    return "KILLED" if State.PLANNED in states else "FINISHED"


def _new(want: _Wanted, group: _Group, runs: Path) -> list[str]:
    """The trials that MLflow does not know as they are."""
    had = group.children
    return [
        trial
        for trial, cell in want.cells.items()
        if (_began(want.looks[trial]) or _removed(had.get(trial), runs))
        and (
            trial not in had
            or had[trial].look != want.looks[trial]
            or not had[trial].current
            or had[trial].place != json.dumps(cell.place)
        )
    ]


def _removed(child: _Child | None, runs: Path) -> bool:
    """Return whether a trial that is not there ran when MLflow was last told of it."""
    return child is not None and child.look[0] == State.RUNNING


def _news(wanted: Mapping[str, _Wanted], groups: Mapping[str, _Group], runs: Path) -> bool:
    for key, want in wanted.items():
        group = groups.get(key)
        if group is None or group.status != want.status or group.view != want.view or _new(want, group, runs):
            return True
    return any(_orphans(group, wanted.get(key), runs) for key, group in groups.items())


def _orphans(group: _Group, want: _Wanted | None, runs: Path) -> list[RunFolder]:
    """Return the trials of this store that MLflow believes to be running, that do not run, and that the plan lacks.

    The store may be mounted elsewhere than when a folder was noted, so only the folder's name counts.
    """
    children = {RunFolder(runs / Path(child.folder).name, trial): child for trial, child in group.children.items()}
    return [
        folder
        for folder, child in children.items()
        if child.look[0] == State.RUNNING
        and not (want and folder.id in want.cells)
        and store.state(folder) is not State.RUNNING
    ]


# ------------------------------------------------------------------------------------------------ what was said


def _read(runs: Path, uri: str, owner: Owner) -> dict[str, _Group]:
    try:
        told = json.loads((runs / CACHE).read_text())[owner.cache_key(uri)]
        groups = {key: _Group(**group) for key, group in told.items()}
        for group in groups.values():
            group.children = {trial: _Child(**child) for trial, child in group.children.items()}  # type: ignore[arg-type]
        if not all(child.look for group in groups.values() for child in group.children.values()):
            return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return _still_there(uri, groups) if uri.startswith(mlflow_database.SCHEME) else groups


def _write(runs: Path, uri: str, owner: Owner, groups: Mapping[str, _Group]) -> None:
    try:
        told = json.loads((runs / CACHE).read_text())
        told = {key: value for key, value in told.items() if "://" not in key}  # earlier versions wrote URIs here
    except (OSError, ValueError, AttributeError):
        told = {}
    write_json(runs / CACHE, {**told, owner.cache_key(uri): {key: asdict(group) for key, group in groups.items()}})


def _without_user(uri: str) -> str:
    """Return a server's address without the user and password that it may name: a browser asks for them."""
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return redacted(f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}")


def _still_there(uri: str, groups: dict[str, _Group]) -> dict[str, _Group]:
    """Without those that a database has lost, or that somebody deleted: it may have been made anew."""
    path = mlflow_database.path_of(uri)
    if not path.exists():
        return {}
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            found = database.execute("select run_uuid from runs where lifecycle_stage = 'active'")
            active = {run for (run,) in found}
    except sqlite3.Error:
        return {}
    return {key: group for key, group in groups.items() if group.parent in active}
