"""MLflow beside a trial, if it is asked for: a view, never the truth. Metrics are buffered and sent between steps.

What MLflow has is taken from the run folder's own numbers, so a resumed trial goes on in the run that it began.
Nothing that goes wrong there stops a trial: it is said once, and the trial goes on without.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from fewbits.experiments.run_folder import RunFolder
from fewbits.experiments.trial import Runtime, Trial

EXPERIMENT = "fewbits"
TAG = "fewbits.trial"
BATCH = 1000  # metrics that MLflow takes at once


class Tracker:
    def __init__(self, trial: Trial, runtime: Runtime, folder: RunFolder) -> None:
        self._client: Any = None
        self._waiting: list[tuple[str, float, int, int]] = []
        if runtime.tracking == "mlflow":
            self._guarded(self._begin, trial, folder)

    def log(self, row: Mapping[str, float], tokens_per_second: float) -> None:
        if self._client is None:
            return
        now, step = int(time.time() * 1000), int(row["step"])
        values = {key: value for key, value in row.items() if key != "step"} | {"tokens_per_second": tokens_per_second}
        self._waiting += [(key, value, now, step) for key, value in values.items() if math.isfinite(value)]

    def flush(self) -> None:
        if self._client is not None:
            self._guarded(self._send)

    def end(self, result: Mapping[str, Any]) -> None:
        self.flush()
        if self._client is not None:
            status = "FINISHED" if result["status"] == "done" else "FAILED"
            self._guarded(self._client.set_terminated, self._run, status)

    def _begin(self, trial: Trial, folder: RunFolder) -> None:
        import mlflow

        client = mlflow.MlflowClient()
        found = client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else client.create_experiment(EXPERIMENT)
        earlier = client.search_runs([experiment], f"tags.`{TAG}` = '{folder.id}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            tags = {TAG: folder.id, "mlflow.source.name": "fewbits train"}
            self._run = client.create_run(experiment, run_name=folder.path.name, tags=tags).info.run_id
            params = {
                "model": trial.model.name,
                "recipe": trial.recipe.name,
                "data": trial.data.kind,
                "seed": trial.seed,
            }
            for key, value in params.items():
                client.log_param(self._run, key, value)
            client.log_artifact(self._run, str(folder.path / "config.yaml"))
        self._client = client

    def _send(self) -> None:
        from mlflow.entities import Metric

        for start in range(0, len(self._waiting), BATCH):
            metrics = [Metric(*values) for values in self._waiting[start : start + BATCH]]
            self._client.log_batch(self._run, metrics=metrics)
        self._waiting = []

    def _guarded(self, act: Callable[..., object], *arguments: object) -> None:
        try:
            act(*arguments)
        except Exception as error:  # whatever a server or a network can do
            self._client = None
            warnings.warn(f"MLflow is left aside: {error}", RuntimeWarning, stacklevel=2)
