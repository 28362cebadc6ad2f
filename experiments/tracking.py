"""MLflow beside a trial, if it is asked for: a view, never the truth. Metrics are sent at checkpoints, never per step.

Only steps that a checkpoint holds are sent, and what MLflow has is asked when a trial begins or goes on; so a trial
that was killed, wherever it was, goes on in the same MLflow run, with every step in it once. Nothing that goes wrong
there stops a trial: it is said once, tried again later, and made up for by the next trial of the same id.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fewbits.experiments.run_folder import RunFolder
from fewbits.experiments.trial import Runtime, Trial

EXPERIMENT = "fewbits"
TAG = "fewbits.trial"
BATCH = 1000  # metrics that MLflow takes at once; they appear together or not at all
SHARE = 20  # a failed attempt that took a second is repeated after so many seconds at the earliest

Row = Mapping[str, float]


class Tracker:
    def __init__(self, trial: Trial, runtime: Runtime, folder: RunFolder) -> None:
        self._trial, self._folder = trial, folder
        self._client: Any = None
        self._tokens = 0.0  # of the last row that MLflow has
        self._on = runtime.tracking == "mlflow"
        self._not_before = -math.inf
        self._told = False
        if self._on:
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
            self._guarded(self._begin)

    def send(self, metrics: Sequence[Row], timing: Sequence[Row]) -> None:
        """All rows that MLflow does not have yet."""
        if self._on and time.monotonic() >= self._not_before:
            self._guarded(self._send, metrics, timing)

    def end(self, metrics: Sequence[Row], timing: Sequence[Row], result: Mapping[str, Any]) -> None:
        if self._on:
            self._guarded(self._end, metrics, timing, result)

    def _begin(self) -> None:
        import mlflow

        client, trial, folder = mlflow.MlflowClient(), self._trial, self._folder
        experiment = _experiment(client)
        earlier = client.search_runs([experiment], f"tags.`{TAG}` = '{folder.id}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            self._tokens = earlier[0].data.metrics.get("tokens", 0.0)
            client.update_run(self._run, status="RUNNING")
        else:
            tags = {TAG: folder.id, "mlflow.source.name": "fewbits train"}
            self._run = client.create_run(experiment, run_name=folder.path.name, tags=tags).info.run_id
            names = {"model": trial.model.name, "recipe": trial.recipe.name, "data": trial.data.kind}
            for key, value in {**names, "seed": trial.seed}.items():
                client.log_param(self._run, key, value)
            client.log_artifact(self._run, str(folder.path / "config.yaml"))
        self._client = client

    def _send(self, metrics: Sequence[Row], timing: Sequence[Row]) -> None:
        if self._client is None:
            self._begin()
        times = {row["step"]: row for row in timing}
        new = [row for row in metrics if row["tokens"] > self._tokens]
        for rows in _batches(new):
            sent = [metric for row in rows for metric in _metrics(row, times.get(row["step"], {}))]
            self._client.log_batch(self._run, metrics=sent)
            self._tokens = rows[-1]["tokens"]

    def _end(self, metrics: Sequence[Row], timing: Sequence[Row], result: Mapping[str, Any]) -> None:
        self._send(metrics, timing)
        have = self._client.get_run(self._run).data.metrics
        for key, value in _scores(result):
            if key not in have:
                self._client.log_metric(self._run, key, value, step=result["step"])
        self._client.set_terminated(self._run, "FINISHED" if result["status"] == "done" else "FAILED")

    def _guarded(self, act: Callable[..., object], *arguments: object) -> None:
        began = time.monotonic()
        try:
            act(*arguments)
        except Exception as error:  # whatever a server or a network can do
            now = time.monotonic()
            self._not_before = now + SHARE * (now - began)
            if not self._told:
                said = " ".join(str(error).split())[:200]
                warnings.warn(f"MLflow is left aside, the trial goes on: {said}", RuntimeWarning, stacklevel=2)
            self._told = True


def _experiment(client: Any) -> str:
    if found := client.get_experiment_by_name(EXPERIMENT):
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(EXPERIMENT))
    except Exception:
        if found := client.get_experiment_by_name(EXPERIMENT):  # another trial was faster
            return str(found.experiment_id)
        raise


def _batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Whole rows, as many as MLflow takes at once."""
    size = max((len(row) + 1 for row in rows), default=1)
    for start in range(0, len(rows), BATCH // size):
        yield rows[start : start + BATCH // size]


def _metrics(row: Row, timing: Row) -> Iterator[Any]:
    from mlflow.entities import Metric

    at = round(1000 * timing.get("time", time.time()))
    values = {**row, **{key: timing[key] for key in ("tokens_per_second", "mfu") if key in timing}}
    for key, value in values.items():
        if key != "step" and math.isfinite(value):
            yield Metric(key, value, at, int(row["step"]))


def _scores(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What only the end of a trial is judged by."""
    for key, value in result.items():
        if key.endswith("_cloze"):
            yield key, value["accuracy"]
    for task, metrics in result.get("tasks", {}).items():
        for name, value in metrics.items():
            if value is not None:
                yield f"tasks/{task}/{name.replace(',', '.')}", value
