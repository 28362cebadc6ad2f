"""Copy a store's trials to MLflow, which is only a view of the store.

An experiment is a study, or `fewbits` for single runs. Its top-level runs are arms and trials of `fewbits
train`; the trials of an arm are nested. Runs are found again by their tags. Workers never connect to MLflow.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.common.store_folder import runs_option, store_folder
from fewbits.common.wording import redacted
from fewbits.experiments.storage.run_folder import RunFolder, opened, saved_trial
from fewbits.experiments.trial import Runtime
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.store import State
from fewbits.sweeps.planning.stored_plans import selection, stored_plans
from fewbits.sweeps.tracking import connection
from fewbits.sweeps.tracking.arms import Arm, about, arms_of, write_arms
from fewbits.sweeps.tracking.connection import DATABASE, Patience, connect, locked, owner_of, tracking_uri
from fewbits.sweeps.tracking.points import began
from fewbits.sweeps.tracking.runs import KIND, SOURCE, TRIAL, make, only, search, send_trial

if TYPE_CHECKING:
    from mlflow import MlflowClient

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
        """A line that tells where the trials can be seen, without the password in a server's URI."""
        names = ", ".join(dict.fromkeys(sweep.study for sweep in self._plan.sweeps))
        if self.to_server:
            scheme, _, rest = self.uri.partition("://")
            host, slash, path = rest.partition("/")
            return redacted(f"MLflow shows {names}: {scheme}://{host.rpartition('@')[2]}{slash}{path}")
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
