"""Copy a store's trials to MLflow, which is only a view of the store.

An experiment is a study, or `fewbits` for single runs. Its top-level runs are arms and trials of `fewbits
train`; the trials of an arm are nested. Runs are found again by their tags. Workers never connect to MLflow.

An arm's metrics are means over the trials that have ended, or while none has, over those that have steps. MLflow cannot
delete points, so when this set of trials changes, the arm's run is deleted and created again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fewbits.common.store_folder import runs_option, store_folder
from fewbits.common.wording import redacted
from fewbits.experiments.storage.run_folder import RunFolder, opened, plain, saved_trial
from fewbits.experiments.trial import Branch, Runtime, Trial
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.store import State, trial_statuses
from fewbits.sweeps.planning.stored_plans import selection, stored_plans
from fewbits.sweeps.planning.sweep import SEED, Sweep
from fewbits.sweeps.tracking import connection, runs
from fewbits.sweeps.tracking.connection import DATABASE, Patience, connect, locked, owner_of, tracking_uri
from fewbits.sweeps.tracking.points import arm_points, began, ended, key_of
from fewbits.sweeps.tracking.runs import (
    ARM,
    FOLDER,
    KIND,
    NOTE,
    PARENT,
    SCALE,
    SENT,
    SOURCE,
    SWEEP,
    TRIAL,
    make,
    only,
    search,
    send_trial,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

VARIANT, TRIALS = "fewbits.variant", "fewbits.trials"  # tags: a hash of a trial's settings; a hash of an arm's trials
SELECTION = {"study", "sweep", "scale", "seeds", "only", "axes", "runtime", "hydra", "file"}  # keys not in labels
LONG = 40  # the most characters of overrides in a label
FEW = 4  # up to this number of arms, one request for each arm is faster than one for all runs of the experiment


class Row(NamedTuple):
    """A trial of an arm, and its state."""

    folder: RunFolder
    state: State

    @property
    def begun(self) -> bool:
        return self.state not in (State.PLANNED, State.BLOCKED) or (self.folder.path / "config.yaml").exists()


@dataclass
class Arm:
    """The trials of a sweep that differ only in their seed."""

    sweep: Sweep
    name: str  # the arm and the values of its axes
    label: str  # the name with the sweep, the scale and overrides of the command: unique in the study
    trial: Trial  # any of its trials
    params: dict[str, str]
    rows: dict[str, Row] = field(default_factory=dict)  # by seed

    @property
    def key(self) -> tuple[str, str]:
        return self.sweep.study, self.label

    @property
    def variant(self) -> str:
        """A hash of the settings that the trials have in common: it differs after the sweep file was edited."""
        common = replace(self.trial, seed=0, branch=Branch(None, self.trial.branch.step))
        return _hash(json.dumps(plain(common.to_dict()), sort_keys=True, default=str))

    @property
    def stamp(self) -> str:
        """A hash of the states and files of the trials."""
        return _hash(*(runs.stamp_of(*row) for row in self.rows.values()))


def about(trial: Trial) -> dict[str, str]:
    """Return the parameters that every trial has in MLflow."""
    names = {"model": trial.model.name, "recipe": trial.recipe.label, "data": trial.data.kind}
    return {**names, SEED: str(trial.seed)}


def arms_of(plan: Plan, overrides: Sequence[str] = ()) -> list[Arm]:
    """Return the arms of a plan. overrides: those of its command, which the labels contain if they change trials."""
    sweeps = {(sweep.study, sweep.name, sweep.scale): sweep for sweep in plan.sweeps}
    statuses, arms, extra = trial_statuses(plan), dict[tuple[str, str], Arm](), _extra(overrides)
    for member in plan.members:
        cell, planned = member.cell, plan.trials[member.id]
        sweep = sweeps[member.study, cell.sweep, member.scale]
        axes = [axis for axis, _ in cell.axes]
        last = [axis.rpartition(".")[2] for axis in axes]
        short = [name if last.count(name) == 1 else axis for axis, name in zip(axes, last, strict=True)]
        values = [f"{name}={value}" for name, (_, value) in zip(short, cell.axes, strict=True)]
        name = " ".join([*([cell.arm] if cell.arm else []), *values]) or planned.trial.recipe.label
        where = ", ".join([*([sweep.name] if sweep.name != sweep.study else []), sweep.scale, *extra])
        label = f"{name} ({where})".translate(dict.fromkeys(map(ord, "'\"`")))  # MLflow's queries cannot contain quotes
        params = {key_of(key): value[:6000] for key, value in {**about(planned.trial), **cell.place}.items()}
        del params[SEED]
        arm = Arm(sweep, name, label, planned.trial, params)
        arms.setdefault(arm.key, arm).rows[str(cell.seed)] = Row(planned.folder, statuses[member.id].state)
    return list(arms.values())


def _extra(overrides: Sequence[str]) -> list[str]:
    """Return a short text for the overrides that change trials, or nothing if there are none."""
    keys = {text: text.lstrip("+~").partition("=")[0].partition(".")[0] for text in overrides}
    text = " ".join(sorted(text for text, key in keys.items() if "=" in text and key not in SELECTION))
    return [text if len(text) <= LONG else f"overrides {_hash(text)[:4]}"] if text else []


def write_arms(client: MlflowClient, uri: str, folder: Path, owner: dict[str, str], arms: Iterable[Arm]) -> int:
    """Write what MLflow does not have yet of arms of the store in `folder`; return how many trials were sent."""
    by_study: dict[str, list[Arm]] = {}
    for arm in arms:
        by_study.setdefault(arm.sweep.study, []).append(arm)
    sent = 0
    for study, of_study in by_study.items():
        experiment = connection.experiment(client, study, folder, uri)
        keys = [owner | {ARM: arm.label} for arm in of_study] if len(of_study) <= FEW else [owner]
        found: dict[str, list[Run]] = {}
        for run in (run for key in keys for run in runs.search(client, experiment, key)):
            found.setdefault(run.data.tags.get(ARM, ""), []).append(run)
        for arm in of_study:
            sent += _write(client, experiment, folder, owner, arm, found.get(arm.label, []))
    return sent


def _write(
    client: MlflowClient, experiment: str, folder: Path, owner: dict[str, str], arm: Arm, found: list[Run]
) -> int:
    """Write an arm; found: the runs that MLflow has of it. Return how many trials were sent."""
    children = _children(client, folder, arm, [run for run in found if run.data.tags.get(KIND) == "trial"])
    shown = {seed: row for seed, row in sorted(arm.rows.items()) if row.begun or seed in children}
    if not shown:
        return 0
    over = [row.folder for row in shown.values() if row.folder.over]
    counted = over or [row.folder for row in shown.values() if (row.folder.path / "timing.parquet").exists()]
    common = {SWEEP: arm.sweep.name, SCALE: arm.sweep.scale, SOURCE: "fewbits sweep"}
    trials, key = _hash(*(one.id for one in counted)), owner | {ARM: arm.label}
    head = runs.only(client, [run for run in found if run.data.tags.get(KIND) == "arm"])
    if head and (head.data.tags.get(TRIALS) != trials or head.data.params != arm.params):
        client.delete_run(head.info.run_id)
        head = None
    start = min(began(row.folder) for row in shown.values())
    head = head or runs.make(client, experiment, key | {KIND: "arm"}, arm.label, arm.params, start)
    notes = [f"seed {seed}: {text}" for seed, row in shown.items() if (text := runs.note(*row))]
    runs.set_tags(client, head, {**common, TRIALS: trials, NOTE: "\n\n".join(filter(None, [arm.sweep.about, *notes]))})
    sent = 0
    for seed, row in shown.items():
        of_trial, params = key | {KIND: "trial", TRIAL: row.folder.id}, arm.params | {SEED: seed}
        child = children.get(seed)
        try:
            begin = began(row.folder)
            child = child or runs.make(client, experiment, of_trial, f"{arm.name}, seed {seed}", params, begin)
            tags = {**common, PARENT: head.info.run_id, VARIANT: arm.variant}
            sent += runs.send_trial(client, child, row.folder, row.state, tags)
        except ValueError as error:  # a file is damaged
            warnings.warn(f"{row.folder.path.name} was not sent to MLflow: {error}", RuntimeWarning, stacklevel=4)
    stamp, (last, of_last) = _hash(*(runs.stamp_of(one, State.DONE) for one in counted)), runs.last_sent(head)
    if counted and stamp != of_last:
        with contextlib.suppress(ValueError):  # a damaged file, which a warning has named
            points = list(arm_points(counted, last, arm.trial.training.steps))
            runs.send_points(client, head, points)
            client.set_tag(head.info.run_id, SENT, f"{max([last, *(point.step for point in points)])} {stamp}")
    status = _status([row.state for row in arm.rows.values()])
    runs.set_status(client, head, status, max(map(ended, over), default=time.time()))
    return sent


def _children(client: MlflowClient, store_folder: Path, arm: Arm, found: Sequence[Run]) -> dict[str, Run]:
    """Return the trials' runs by seed, and delete those of other settings, versions of the code, or duplicates.

    Seeds that another command trains with the same settings are added to the arm.
    """
    children: dict[str, Run] = {}
    for run in found:
        tags, seed = run.data.tags, run.data.params.get(SEED, "")
        row, folder = arm.rows.get(seed), RunFolder(store_folder / Path(tags.get(FOLDER, "")).name, tags[TRIAL])
        same = tags.get(VARIANT) == arm.variant and run.data.params == arm.params | {SEED: seed}
        if not same or seed in children or (row is not None and row.folder.id != folder.id):
            client.delete_run(run.info.run_id)
        else:
            children[seed] = run
            arm.rows.setdefault(seed, Row(folder, store.state(folder)))
    return children


def _status(states: Sequence[State]) -> str:
    """Return MLflow's status of an arm from the states of its trials."""
    if State.RUNNING in states:
        return "RUNNING"
    if set(states) & {State.FAILED, State.BLOCKED, State.DIVERGED}:
        return "FAILED"
    return "SCHEDULED" if State.PLANNED in states else "FINISHED"


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ mirror

SINGLE = "fewbits"  # the MLflow experiment with the runs of `fewbits train`


class Mirror:
    """The copy of one plan's trials in MLflow. overrides: those of the plan's command. uri: None: that of the store."""

    def __init__(self, plan: Plan, overrides: Sequence[str] = (), uri: str | None = None) -> None:
        self._plan, self._overrides = plan, selection(overrides)
        self.uri = uri or tracking_uri(plan.store)
        self._patience = Patience()
        self._seen: dict[tuple[str, str], str] = {}  # study and label of an arm: its stamp when it was sent

    @property
    def to_server(self) -> bool:
        return self.uri.startswith("http")

    @property
    def line(self) -> str:
        """A line that tells where the trials can be seen."""
        names = ", ".join(dict.fromkeys(sweep.study for sweep in self._plan.sweeps))
        if self.to_server:
            return redacted(f"MLflow shows {names}: {self.uri}")
        option = "" if os.environ.get("MLFLOW_TRACKING_URI") else runs_option(self._plan.store)
        return f"`fewbits ui{option}` shows in MLflow: {names}"

    def sync(self, *, last: bool = False) -> bool:
        """Send to MLflow what has changed since the last call; return False if something could not be sent.

        last: compare everything with what MLflow has, so that runs are created again that a user has deleted there.
        """
        if not (last or self._patience.may_retry):
            return False
        runs = self._plan.store
        with self._patience.guarding("trials go on"):
            arms = arms_of(self._plan, self._overrides)
            stamps = {arm.key: arm.stamp for arm in arms}
            if due := [arm for arm in arms if last or self._seen.get(arm.key) != stamps[arm.key]]:
                client = connect(runs, self.uri)
                with locked(runs):
                    write_arms(client, self.uri, runs, owner_of(runs), due)
            self._seen = stamps
            return True
        return False


class Tracker:
    """Sends the trial of `fewbits train` to MLflow, if runtime.tracking is `mlflow`, or `auto` and MLflow is in use."""

    def __init__(self, runtime: Runtime) -> None:
        own = os.environ.get("MLFLOW_TRACKING_URI") is None and (store_folder(runtime.runs) / DATABASE).exists()
        self._on = runtime.tracking == "mlflow" or (runtime.tracking == "auto" and own)
        self._patience = Patience()
        self._folder: RunFolder | None = None

    def saved(self, folder: RunFolder, state: State = State.RUNNING) -> None:
        """Send the trial; it is called each time the config, a checkpoint or the result was written."""
        if self._on and (folder.over or self._patience.may_retry):
            self._folder = folder
            with self._patience.guarding("the trial goes on"):
                runs = folder.path.parent
                uri = tracking_uri(runs)
                _send_single(connect(runs, uri), uri, folder, store.state(folder) if folder.over else state)

    def close(self) -> None:
        """Set the MLflow run's status to KILLED if training has ended, by an error or Ctrl-C, without a result."""
        if self._folder is not None and not self._folder.over:
            self.saved(self._folder, State.PLANNED)


def experiments(runs: Path, uri: str) -> dict[str, str]:
    """Return the name and id of each MLflow experiment with runs of the store, that with the newest run first."""
    client, newest = connect(runs, uri), dict[tuple[str, str], int]()
    owned = f"tags.`{connection.STORE}` = '{connection.store_id(runs)}'"
    for one in client.search_experiments():
        for run in client.search_runs([one.experiment_id], owned, max_results=1, order_by=["start_time DESC"]):
            newest[one.name, one.experiment_id] = run.info.start_time
    return dict(sorted(newest, key=lambda one: newest[one], reverse=True))


def _send_single(client: MlflowClient, uri: str, folder: RunFolder, state: State) -> bool:
    runs = folder.path.parent
    with locked(runs):
        experiment = connection.experiment(client, SINGLE, runs, uri)
        key = owner_of(runs) | {KIND: "single", TRIAL: folder.id}
        run = only(client, search(client, experiment, key))
        params = about(saved_trial(folder.path))
        run = run or make(client, experiment, key, folder.path.name, params, began(folder))
        return send_trial(client, run, folder, state, {SOURCE: "fewbits"})


def send_store(runs: Path, uri: str) -> int:
    """Send all stored plans of a store and all runs that are in none to MLflow; return how many trials were sent.

    An imported model is left out, since it has no steps. Where two plans have the same arm with other settings, that of
    the newest plan is shown.
    """
    arms: dict[tuple[str, str], Arm] = {}
    planned = set[str]()
    for stored in stored_plans(runs, lambda error: warnings.warn(str(error), RuntimeWarning, stacklevel=2)):
        planned |= stored.plan.trials.keys()
        for arm in arms_of(stored.plan, stored.overrides):
            newest = arms.setdefault(arm.key, arm)
            if newest.variant == arm.variant:
                newest.rows = arm.rows | newest.rows
    client = connect(runs, uri)
    client.search_experiments(max_results=1)  # raises an error if the database is damaged, also if there are no trials
    with locked(runs):
        sent = write_arms(client, uri, runs, owner_of(runs), arms.values())
    for path in sorted(runs.glob("*/provenance.json")):
        try:
            folder = opened(path.parent)
            if folder.id not in planned and (path.parent / "metrics.parquet").exists():
                sent += _send_single(client, uri, folder, store.state(folder))
        except ValueError as error:  # a file is damaged
            warnings.warn(f"{path.parent.name} was not sent to MLflow: {error}", RuntimeWarning, stacklevel=2)
    return sent
