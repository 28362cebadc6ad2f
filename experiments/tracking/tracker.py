"""Copy run folders to MLflow while `fewbits train` runs, and end the MLflow runs of trials that were killed.

MLflow gets copies only: all results are in the run folder. A failure of MLflow does not stop a trial. It is reported
once, and sending is tried again later; what is still missing at the end is sent when the same trial is run again.
"""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.experiments.storage.run_folder import RunFolder, saved_trial
from fewbits.experiments.tracking.connection import Patience, connect, experiment, tracking_uri
from fewbits.experiments.tracking.mlflow_runs import FOLDER, TRIAL, OwnedRuns
from fewbits.experiments.tracking.owner import owner_of
from fewbits.experiments.tracking.points import began, ended
from fewbits.experiments.tracking.send import STATUS, send
from fewbits.experiments.tracking.system_metrics import sampled
from fewbits.experiments.trial import Runtime, Trial

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "fewbits"  # the name of the MLflow experiment with the runs of `fewbits train`


def about(trial: Trial) -> dict[str, str]:
    """Return the parameters that every trial has in MLflow: model, recipe, data and seed."""
    names = {"model": trial.model.name, "recipe": trial.recipe.label, "data": trial.data.kind}
    return {**names, "seed": str(trial.seed)}


def reap(client: MlflowClient, runs: Path) -> int:
    """End the MLflow runs that still have the status RUNNING although their `fewbits train` was killed.

    Only runs of this user, the store `runs` and this host are ended. Return how many were ended.
    """
    trials = client.get_experiment_by_name(EXPERIMENT)
    if trials is None:
        return 0
    reaped, owned = 0, OwnedRuns(client, trials.experiment_id, owner_of(runs))
    owned.adopt(runs, {})
    for run in owned.search({}):
        tags = run.data.tags
        folder = RunFolder(runs.resolve() / Path(tags.get(FOLDER, "")).name, tags.get(TRIAL, ""))
        origin = folder.provenance() or {}
        here = origin.get("host") == platform.node()
        if run.info.status == "RUNNING" and here and not _is_alive(origin["process"]):
            result = folder.result()
            status = "KILLED" if result is None else STATUS[result["status"]]
            client.set_terminated(run.info.run_id, status, round(1000 * ended(folder)))
            reaped += 1
    return reaped


def _is_alive(process: int) -> bool:
    """Tell whether a process with this id exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class Tracker:
    """Sends a trial's run folder to MLflow, if runtime.tracking is `mlflow`.

    `fewbits train` calls `saved` each time the config, a checkpoint or the result was written, and calls `close` when
    training ends, also by an error or an interruption.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._on = runtime.tracking == "mlflow"
        self._patience = Patience()
        self._connected: tuple[MlflowClient, str] | None = None
        self._folder: RunFolder | None = None
        self._sampling = ExitStack()

    def saved(self, folder: RunFolder) -> None:
        if self._on:
            if self._folder is None:
                self._sampling.enter_context(sampled(folder.path))
            self._folder = folder
            self._send(folder, "RUNNING")

    def close(self) -> None:
        """Stop sampling system metrics, and set the MLflow run's status to KILLED if the trial has no result."""
        self._sampling.close()
        if self._folder is not None and self._folder.result() is None:
            self._send(self._folder, "KILLED")

    def _send(self, folder: RunFolder, status_without_result: str) -> None:
        """Send the new content of the run folder to MLflow.

        After a failed attempt to send, do nothing until the delay of `Patience` is over, unless the trial has a result.
        status_without_result: the MLflow run's status if the trial has no result.
        """
        result = folder.result()
        if result is None and not self._patience.may_retry:
            return
        with self._patience.guarding("the trial goes on"):
            status = status_without_result if result is None else STATUS[result["status"]]
            (client, run), self._connected = self._connected or self._connect(folder), None
            params = about(saved_trial(folder.path)) if (folder.path / "config.yaml").exists() else {}
            send(client, client.get_run(run), folder, status, params, {FOLDER: str(folder.path.resolve())})
            self._connected = client, run  # after a failure the next attempt connects again

    def _connect(self, folder: RunFolder) -> tuple[MlflowClient, str]:
        """Return a client, and the id of the trial's MLflow run, which is created if needed."""
        runs = folder.path.parent
        uri = tracking_uri(runs)
        client = connect(runs, uri)
        trials = OwnedRuns(client, experiment(client, EXPERIMENT, runs, uri), owner_of(runs))
        trials.adopt(runs, {TRIAL: folder.id})
        source = {"mlflow.source.name": "fewbits train"}
        run = trials.find_or_create({TRIAL: folder.id}, folder.path.name, source, began(folder))
        return client, run.info.run_id
