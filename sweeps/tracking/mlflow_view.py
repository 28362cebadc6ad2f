"""Show a plan's trials in MLflow, which has a copy of numbers in the store; `fewbits sync` can make this copy again.

    in MLflow    shows                                         has the tags
    experiment   a study
    parent run   a sweep at a scale, for each store and user   fewbits.sweep, fewbits.scale
    child run    a trial of the sweep that has started         fewbits.trial, .folder, .state, .place, .current, .reason

All runs also have the tags fewbits.store, fewbits.user and mlflow.user. A driver creates, changes and deletes only runs
of its own store and user. Runs that older versions of fewbits sent have no such tags; a driver adds them if the run's
folder is in its store.

Workers never connect to MLflow; drivers do. The cache file of sent.py records what was sent. If MLflow shows a run as
running but no worker trains its trial, the run is set to KILLED; when the trial resumes, the same run is set to
RUNNING. Several trials may have had the same place in a sweep, for example after a change of the code. Then the trial
of the newest plan is current, and the comparison view shows only current trials.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.tracking import connection, mlflow_runs
from fewbits.experiments.tracking.mlflow_runs import FOLDER, TRIAL, OwnedRuns
from fewbits.experiments.tracking.owner import STORE, Owner, owner_of
from fewbits.experiments.tracking.points import began
from fewbits.experiments.tracking.send import send
from fewbits.experiments.tracking.tracker import about, reap
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.sweep import Sweep
from fewbits.sweeps.running import store
from fewbits.sweeps.running.store import State
from fewbits.sweeps.running.trial_status import trial_statuses
from fewbits.sweeps.tracking.comparison import (
    COMPARED,
    CURRENT,
    KIND,
    SCALE,
    SWEEP,
    TAG,
    compared,
    group_of,
    numerics_shown,
    view_of,
)
from fewbits.sweeps.tracking.reports import send_reports
from fewbits.sweeps.tracking.sent import (
    Look,
    SentSweep,
    SentTrial,
    WantedSweep,
    look_at,
    look_at_database,
    place_of,
    read_sent,
    write_sent,
)
from fewbits.sweeps.tracking.synced import Synced

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

STATE, PLACE, REASON = "fewbits.state", "fewbits.place", "fewbits.reason"
PARENT, SOURCE, NOTE = "mlflow.parentRunId", "mlflow.source.name", "mlflow.note.content"
STATUS = {
    State.PLANNED: "KILLED",  # the trial has started, since it has a run, but no worker trains it now
    State.RUNNING: "RUNNING",
    State.DONE: "FINISHED",
    State.FAILED: "FAILED",
    State.DIVERGED: "FAILED",
}


class Mirror:
    """The copy of one plan's trials in MLflow. `sync` may be called from any thread; each error is reported once.

    uri: MLflow's tracking URI; None: the one in MLFLOW_TRACKING_URI, or else the store's own database.
    """

    def __init__(self, plan: Plan, uri: str | None = None) -> None:
        self._plan = plan
        self._runs = plan.store
        self.uri = uri or connection.tracking_uri(self._runs)
        self._patience = connection.Patience()
        self._client: MlflowClient | None = None
        self._owner: Owner | None = None

    def sync(self, *, afresh: bool = False, last: bool = False) -> Synced:
        """Send to MLflow what has changed since the last update, and return a summary of this update.

        last: True if no driver runs the plan any more. afresh: ask MLflow which runs it has, instead of reading the
        cache file of what was sent.
        """
        with self._patience.guarding("trials go on"):
            self._owner = self._owner or owner_of(self._runs)
        if self._owner is None:  # the store has no id, and none can be written
            return Synced(self.uri, (), 0, True, self._runs)
        owner, runs = self._owner, self._runs
        record, wanted = read_sent(runs, self.uri, owner), self._wanted(last or afresh, owner)
        sent = 0
        away = (
            afresh
            or record.database != look_at_database(self.uri)
            or not all(want.is_sent(record.sweeps.get(key)) for key, want in wanted.items())
            or any(group.orphans(wanted.get(key), runs) for key, group in record.sweeps.items())
            or any(report.unsent for report in record.reports.values())
        )
        if away and (last or afresh or self._patience.may_retry):
            with self._patience.guarding("trials go on"):
                client, self._client = self._client or self._connect(), None
                with connection.locked(runs):
                    record = read_sent(runs, self.uri, owner)
                    if afresh:
                        record.sweeps = {key: group for key, group in record.sweeps.items() if key not in wanted}
                    elif record.database != look_at_database(self.uri):
                        record.sweeps = {key: group for key, group in record.sweeps.items() if _exists(client, group)}
                    try:
                        sent = self._update(client, owner, wanted, record.sweeps)
                        sent += reap(client, runs) if afresh else 0
                        send_reports(client, runs, self.uri, owner, record)
                        record.database = look_at_database(self.uri)
                    finally:
                        write_sent(runs, self.uri, owner, record)
                self._client, away = client, False  # not set after an error, so that the next attempt connects again
        groups = record.sweeps
        views = [view_of(want.sweep, groups[key].experiment, owner) for key, want in wanted.items() if key in groups]
        return Synced(self.uri, tuple(views), sent, away, runs)

    def _connect(self) -> MlflowClient:
        self._runs.mkdir(parents=True, exist_ok=True)
        return connection.connect(self._runs, self.uri)

    def _wanted(self, over: bool, owner: Owner) -> dict[str, WantedSweep]:
        blocked_keys = (key for key, status in trial_statuses(self._plan).items() if status.state is State.BLOCKED)
        blocked = dict.fromkeys(blocked_keys, State.BLOCKED)
        looks = {trial: look_at(planned.folder) for trial, planned in self._plan.trials.items()}
        wanted = {}
        for sweep in self._plan.sweeps:
            cells: dict[str, Cell] = {}
            for member in self._plan.members:
                if (member.study, member.cell.sweep, member.scale) == (sweep.study, sweep.name, sweep.scale):
                    cells.setdefault(member.id, member.cell)
            if cells:
                status = _status([blocked.get(trial, State(looks[trial][0])) for trial in cells], over)
                metrics = numerics_shown(self._plan.trials[trial].trial.recipe for trial in cells)
                wanted[group_of(sweep)] = WantedSweep(sweep, owner, cells, looks, status, metrics)
        return wanted

    def _update(
        self, client: MlflowClient, owner: Owner, wanted: Mapping[str, WantedSweep], groups: dict[str, SentSweep]
    ) -> int:
        sent = 0
        for key, want in wanted.items():
            group = groups.get(key) or self._ask(client, owner, want.sweep)
            groups.pop(key, None)  # put back when all is sent; so after an error, `_ask` reads from MLflow what it has
            if group.view != want.view:
                key_of_view = view_of(want.sweep, group.experiment, owner).key
                client.set_experiment_tag(group.experiment, TAG + key_of_view, want.view)
                group.view = want.view
            for trial in want.unsent(group):
                folder = self._plan.trials[trial].folder
                with _skipping_damage(client, group, folder, want.looks[trial]):
                    self._send_child(client, want, group, trial)
                    sent += 1
            if group.status != want.status:
                client.update_run(group.parent, status=want.status)
                group.status = want.status
            groups[key] = group
        return sent + sum(self._reap(client, group, wanted.get(key)) for key, group in groups.items())

    def _ask(self, client: MlflowClient, owner: Owner, sweep: Sweep) -> SentSweep:
        """Return a record of the runs that MLflow has of this owner's sweep.

        If the experiment or the parent run is missing, create it. If older versions of fewbits sent runs of the sweep
        from this store without an owner, tag these runs as this owner's. If a trial has two runs, delete one of them.
        """
        experiment = connection.experiment(client, sweep.study, self._runs, self.uri)
        key = {SWEEP: sweep.name, SCALE: sweep.scale}
        note = {"mlflow.note.content": sweep.about} if sweep.about else {}
        name = f"{sweep.name} {sweep.scale}"
        owned = OwnedRuns(client, experiment, owner)
        adopted = owned.adopt(self._runs, key)
        if adopted:
            self._adopt_parent(client, experiment, owner, key)
        parent = owned.find_or_create({**key, KIND: "sweep"}, name, note, time.time())
        for run in adopted:
            client.set_tag(run.info.run_id, PARENT, parent.info.run_id)
        group = SentSweep(experiment, parent.info.run_id)
        for run in owned.search(key):
            tags = run.data.tags
            if TRIAL not in tags:
                continue
            child = SentTrial(tags.get(FOLDER, ""), run.info.run_id, tags.get(PLACE, ""), tags.get(CURRENT) == "yes")
            child.look = [tags.get(STATE, State.RUNNING)]
            if tags[TRIAL] in group.children:
                client.delete_run(child.run)
            else:
                group.children[tags[TRIAL]] = child
        return group

    def _adopt_parent(self, client: MlflowClient, experiment: str, owner: Owner, key: Mapping[str, str]) -> None:
        """Tag each parent run without an owner as this owner's, if all its child runs belong to this owner now.

        experiment: its id. key: the tags (name: value) by which to find the sweep's parent and child runs.
        """
        runs = mlflow_runs.search(client, experiment, key)
        for parent in runs:
            children = [run for run in runs if run.data.tags.get(PARENT) == parent.info.run_id]
            if STORE not in parent.data.tags and children and all(owner.owns(run.data.tags) for run in children):
                mlflow_runs.take(client, parent, owner)

    def _send_child(self, client: MlflowClient, want: WantedSweep, group: SentSweep, trial: str) -> None:
        cell, folder, look = want.cells[trial], self._plan.trials[trial].folder, want.looks[trial]
        place = place_of(cell)
        child = group.children.get(trial)
        # The trial's place has changed. Parameters of an MLflow run cannot be changed, so a new run replaces it.
        if child is not None and child.place != place:
            client.delete_run(child.run)
            child = None
        run = self._begin(client, want, group, trial) if child is None else client.get_run(child.run)
        child = child or group.children.setdefault(trial, SentTrial(str(folder.path), run.info.run_id, place))
        of_trial = self._plan.trials[trial].trial
        params = {
            **about(of_trial),
            **cell.place,
            COMPARED: compared(want.sweep, cell) or of_trial.recipe.label,
        }
        _send(client, run, folder, State(look[0]), params)
        for other in group.children.values():
            if other.place == place and other.current and other is not child:
                client.set_tag(other.run, CURRENT, "no")
                other.current = False
        child.folder, child.current, child.look = str(folder.path), True, look

    def _begin(self, client: MlflowClient, want: WantedSweep, group: SentSweep, trial: str) -> Run:
        cell, folder = want.cells[trial], self._plan.trials[trial].folder
        key = {SWEEP: want.sweep.name, SCALE: want.sweep.scale, TRIAL: trial}
        tags = {PARENT: group.parent, PLACE: place_of(cell), SOURCE: "fewbits sweep"}
        tags |= {tag: value for tag, value in _tags(folder, State(want.looks[trial][0])).items() if value}
        name = ", ".join(f"{key} {value}" for key, value in cell.place.items())
        # With the store's SQLite database, the store's lock prevents other drivers from creating the same run. With a
        # server, `owned.find_or_create` also handles a run that another driver creates at the same time.
        alone = self.uri.startswith("sqlite")
        owned = OwnedRuns(client, group.experiment, want.owner)
        make = owned.new if alone else owned.find_or_create
        return make(key, name, {**tags, CURRENT: "yes"}, began(folder))

    def _reap(self, client: MlflowClient, group: SentSweep, want: WantedSweep | None) -> int:
        """Correct the state of the MLflow runs shown as running whose trials have stopped; return their number.

        Trials of the current plan are left out, since `_update` sends them. group: the record of the sweep's runs in
        MLflow. want: the sweep in the current plan; None: the plan does not have the sweep.
        """
        orphans = group.orphans(want, self._runs)
        for folder in orphans:
            child = group.children[folder.id]
            look = look_at(folder)
            with _skipping_damage(client, group, folder, look):
                _send(client, client.get_run(child.run), folder, State(look[0]), {})
            child.look = look
        return len(orphans)


@contextmanager
def _skipping_damage(client: MlflowClient, group: SentSweep, folder: RunFolder, look: Look) -> Iterator[None]:
    """Warn and continue if the `with` block, which sends a trial, raises ValueError because the files are damaged.

    The trial's run in MLflow then lacks data, but its status is set. The next update sends the trial again.

    group: the record of the sweep's runs in MLflow. folder: the trial's run folder. look: the trial's present state and
    files (see `look_at`).
    """
    try:
        yield
    except ValueError as error:
        warnings.warn(f"{folder.path.name} was not sent to MLflow: {error}", RuntimeWarning, stacklevel=4)
        if (child := group.children.pop(folder.id, None)) is not None:
            client.update_run(child.run, status=STATUS[State(look[0])])


def _exists(client: MlflowClient, group: SentSweep) -> bool:
    """Tell whether MLflow still has a sweep's parent run; users may have deleted it, or the whole database."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(group.parent).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def _send(client: MlflowClient, run: Run, folder: RunFolder, state: State, params: Mapping[str, str]) -> None:
    tags = {**_tags(folder, state), **({CURRENT: "yes"} if params else {})}
    send(client, run, folder, STATUS[state], params, tags)


def _tags(folder: RunFolder, state: State) -> dict[str, str | None]:
    reason, note = _reason(folder, state)
    return {STATE: state.value, FOLDER: str(folder.path), REASON: reason, NOTE: note}


def _reason(folder: RunFolder, state: State) -> tuple[str | None, str | None]:
    """Return why a trial diverged or failed, first as one line and second as a Markdown note.

    The note on a failed trial also contains the last lines of its log. Return (None, None) for trials in other states.
    """
    if state is State.DIVERGED:
        text = f"diverged at step {(folder.result() or {})['step']}"
        return text, text
    failure = store.failure(folder) if state is State.FAILED else None
    if failure is None:
        return None, None
    log = "\n".join(failure.log)
    return failure.reason, f"{failure.reason}\n\n```\n{log}\n```"


def _status(states: list[State], over: bool) -> str:
    """Return MLflow's status of a sweep's parent run from the states of its trials.

    over: True if no driver runs the sweep any more; otherwise planned trials count as running.
    """
    if State.RUNNING in states or (State.PLANNED in states and not over):
        return "RUNNING"
    if State.FAILED in states or State.BLOCKED in states:
        return "FAILED"
    return "KILLED" if State.PLANNED in states else "FINISHED"
