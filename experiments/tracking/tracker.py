"""MLflow as a view of run folders, never the truth: what a folder's files say is sent to a run, each row of it once.

`send` brings one MLflow run up to date with one folder, from the files alone: config.yaml, metrics.parquet,
timing.parquet, result.json; into SQLite, points go without MLflow's help (mlflow_database.py). Sent twice, or by two
processes, it is there once: rows after the last that MLflow has are sent, their times are those of the files, and
MLflow keeps equal points as one. So a trial that was killed, wherever it was, goes on in the same run, and a run can be
made again from nothing.

`Tracker` does that beside `fewbits train`. Nothing that goes wrong in MLflow stops a trial: it is said once, tried
again later, and made up for by the next trial of the same id.
"""

from __future__ import annotations

import io
import logging
import math
import os
import platform
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from fewbits.common.file_systems import network_kind_of
from fewbits.common.locks import locked as flocked
from fewbits.common.redaction import redacted
from fewbits.experiments.runs.run_folder import RunFolder, saved_trial
from fewbits.experiments.tracking import mlflow_database
from fewbits.experiments.tracking.mlflow_database import Point
from fewbits.experiments.tracking.mlflow_runs import FOLDER, TRIAL, adopt, one_run, search
from fewbits.experiments.tracking.owner import owner_of, store_id
from fewbits.experiments.trial import Runtime, Trial
from fewbits.kernels.backends.build import cache_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "fewbits"  # of trials that belong to no study
DATABASE, ARTIFACTS, LOCK = "mlflow.db", "mlartifacts", ".mlflow.lock"  # beside the run folders
NO_LOCKS = "of MLflow runs that two drivers make at once, the next `fewbits sync` keeps one"
BATCH = 1000  # metrics that MLflow takes at once; they appear together or not at all
SHARE = 20  # a failed attempt that took a second is repeated after so many seconds at the earliest
SECTIONS = {  # a metric whose name has a slash gets its chart below that heading
    "gradient_norm": "optimizer",
    "learning_rate": "optimizer",
    "parameter_norm": "optimizer",
    "penalty": "optimizer",
    "tokens_per_second": "speed",
    "mfu": "speed",
}

STATUS = {"done": "FINISHED", "diverged": "FAILED"}  # of a result

Row = Mapping[str, float]


# ------------------------------------------------------------------------------------------------ where MLflow is


def tracking_uri(runs: Path) -> str:
    """Return MLFLOW_TRACKING_URI, else the URI of the store's own database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{mlflow_database.SCHEME}{default_database(runs)}"


_warned: set[Path] = set()  # databases that this process has said to lie elsewhere


def default_database(runs: Path) -> Path:
    """Return the path of the store's own database: beside the run folders, except on a network file system.

    SQLite's locks are unreliable there. The database then lies in this user's cache folder, by the store's id, and one
    warning says so; every command finds the same place.
    """
    kind = network_kind_of(runs)
    if kind is None:
        return runs.resolve() / DATABASE
    cache = cache_folder().expanduser().resolve()
    path = cache / "mlflow" / "stores" / store_id(runs) / DATABASE
    if path not in _warned:
        _warned.add(path)
        advice = "name a server by MLFLOW_TRACKING_URI to share it"
        if (of_cache := network_kind_of(cache)) is not None:
            advice = f"it is on {of_cache} too, set FEWBITS_CACHE to a local folder or {advice}"
        text = f"{runs} is on {kind}, where SQLite is unreliable: MLflow's database is {path}; {advice}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def connect(runs: Path, uri: str) -> MlflowClient:
    """A client. Its database is made here, by one process at a time: MLflow's own making of it bears no company."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # at each run's end, with the URI's password
    import mlflow

    for name, level in (("mlflow", logging.CRITICAL), ("alembic", logging.WARNING)):
        logging.getLogger(name).setLevel(level)  # what goes wrong comes as an exception, and is said in a line
    if uri.startswith(mlflow_database.SCHEME):
        # by path each time: a connection that is kept would go on with a file that was deleted or moved meanwhile
        os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
        runs.mkdir(parents=True, exist_ok=True)
        with locked(runs):
            mlflow_database.make(mlflow_database.path_of(uri))
            return mlflow.MlflowClient(tracking_uri=uri)
    return mlflow.MlflowClient(tracking_uri=uri)


@contextmanager
def locked(runs: Path) -> Iterator[None]:
    """Let one process at a time write to MLflow for these run folders."""
    with (runs / LOCK).open("a") as lock, flocked(lock, NO_LOCKS):
        yield


def experiment(client: MlflowClient, name: str, runs: Path, uri: str) -> str:
    """Its id. Without a server, which decides that itself, its artifacts lie beside the run folders."""
    found = client.get_experiment_by_name(name)
    if found is None:
        location = None if uri.startswith("http") else (runs.resolve() / ARTIFACTS / name).as_uri()
        tags = {"mlflow.experimentKind": "custom_model_development"}  # else the page asks everybody
        try:
            return str(client.create_experiment(name, location, tags))
        except Exception:
            found = client.get_experiment_by_name(name)  # another was faster
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


# ------------------------------------------------------------------------------------------------ what it is sent


def send(
    client: MlflowClient,
    run: Run,  # as MLflow has it
    folder: RunFolder,
    status: str,  # MLflow's word
    params: Mapping[str, str],
    tags: Mapping[str, str | None],  # None: not to be there
) -> None:
    """All that the folder's files say and the run does not; its status last."""
    run_id = run.info.run_id
    if run.info.lifecycle_stage == "deleted":
        client.restore_run(run_id)
    _describe(client, run, params, tags)
    have = run.data.metrics
    rows = [row for row in _table(folder.path / "metrics.parquet") if row["tokens"] > have.get("tokens", 0)]
    result = (folder.result() if status == STATUS["done"] else None) or {}
    scores = {key: value for key, value in _scores(result) if _key(key) not in have}
    _log(client, run_id, rows, _times(folder), [_point(key, scores[key], _ended(folder), result) for key in scores])
    _keep_config(client, run, folder.path / "config.yaml")
    if run.info.status != status:
        if status == "RUNNING":
            client.update_run(run_id, status=status)
        else:
            client.set_terminated(run_id, status, round(1000 * _ended(folder)))


def _describe(client: MlflowClient, run: Run, params: Mapping[str, str], tags: Mapping[str, str | None]) -> None:
    from mlflow.entities import Param, RunTag

    run_id, there = run.info.run_id, run.data
    new_params = [Param(_key(key), value[:6000]) for key, value in params.items() if _key(key) not in there.params]
    said = {key: value and value[:5000] for key, value in tags.items()}
    new_tags = [RunTag(key, value) for key, value in said.items() if value and there.tags.get(key) != value]
    for key in said:
        if not said[key] and key in there.tags:
            client.delete_tag(run_id, key)
    if new_params or new_tags:
        client.log_batch(run_id, params=new_params, tags=new_tags)


def _log(
    client: MlflowClient, run_id: str, rows: Sequence[Row], times: Mapping[float, Row], scores: Sequence[Point]
) -> None:
    from mlflow.entities import Metric

    if client.tracking_uri.startswith(mlflow_database.SCHEME):
        if rows or scores:
            mlflow_database.add(
                client.tracking_uri, run_id, [*(point for row in rows for point in _points(row, times)), *scores]
            )
        return
    for batch in _batches(rows):
        client.log_batch(run_id, metrics=[Metric(*point) for row in batch for point in _points(row, times)])
    if scores:
        client.log_batch(run_id, metrics=[Metric(*point) for point in scores])


def _keep_config(client: MlflowClient, run: Run, config: Path) -> None:
    """As an artifact."""
    if not config.exists():
        return
    place = run.info.artifact_uri or ""
    if place.startswith("file://"):
        kept = Path(url2pathname(urlsplit(place).path)) / config.name
        moved = any(above.name == ARTIFACTS and not above.parent.exists() for above in kept.parents)
        if not kept.exists() and not moved:  # a store's old place is not made again
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(config, kept)
    elif not client.list_artifacts(run.info.run_id):
        client.log_artifact(run.info.run_id, str(config))


def began(folder: RunFolder) -> float:
    """When its first step began, as far as one can tell."""
    first = next(iter(_table(folder.path / "timing.parquet")), None)
    return first["time"] - first["seconds"] if first else time.time()


def about(trial: Trial) -> dict[str, str]:
    """Parameters that every trial has."""
    names = {"model": trial.model.name, "recipe": trial.recipe.name, "data": trial.data.kind}
    return {**names, "seed": str(trial.seed)}


def _ended(folder: RunFolder) -> float:
    """When something was last written to it."""
    files = [folder.path / name for name in ("result.json", "failure.json", "timing.parquet")]
    return next((file.stat().st_mtime for file in files if file.exists()), time.time())


def _table(path: Path) -> list[dict[str, float]]:
    import pandas as pd

    if not path.exists():
        return []
    table = pd.read_parquet(io.BytesIO(path.read_bytes()))  # at once: a trial that runs replaces it meanwhile
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def _times(folder: RunFolder) -> dict[float, Row]:
    return {row["step"]: row for row in _table(folder.path / "timing.parquet")}


def _batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Whole rows, as many as MLflow takes at once: each has its own metrics and some of its timing."""
    size = max((len(row) + 2 for row in rows), default=1)
    for start in range(0, len(rows), BATCH // size):
        yield rows[start : start + BATCH // size]


def _points(row: Row, times: Mapping[float, Row]) -> Iterator[Point]:
    timing = times.get(row["step"], {})
    values = {**row, **{key: timing[key] for key in ("tokens_per_second", "mfu") if key in timing}}
    for key, value in values.items():
        if key != "step" and math.isfinite(value):
            yield _point(key, value, timing.get("time", 0.0), row)


def _point(key: str, value: float, at: float, row: Mapping[str, Any]) -> Point:
    name = f"{SECTIONS[key]}/{key}" if key in SECTIONS else key
    return Point(_key(name), float(value), round(1000 * at), int(row["step"]))


def _scores(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What only the end of a trial is judged by."""
    for key, value in result.items():
        if key.endswith("_cloze"):
            yield key, value["accuracy"]
    for task, metrics in result.get("tasks", {}).items():
        for name, value in metrics.items():
            if value is not None:
                yield f"tasks/{task}/{name.replace(',', '.')}", value


def _key(name: str) -> str:
    """As MLflow takes it."""
    return re.sub(r"[^\w./ -]", "_", name)


def reap(client: MlflowClient, runs: Path) -> int:
    """End this user's runs of trials in this store whose `fewbits train` was killed on this host; return how many."""
    trials = client.get_experiment_by_name(EXPERIMENT)
    if trials is None:
        return 0
    reaped, owner = 0, owner_of(runs)
    adopt(client, trials.experiment_id, owner, runs, {})
    for run in search(client, trials.experiment_id, owner.key):
        tags = run.data.tags
        folder = RunFolder(runs.resolve() / Path(tags.get(FOLDER, "")).name, tags.get(TRIAL, ""))
        origin = folder.provenance() or {}
        here = origin.get("host") == platform.node()
        if run.info.status == "RUNNING" and here and not _lives(origin["process"]):
            result = folder.result()
            status = "KILLED" if result is None else STATUS[result["status"]]
            client.set_terminated(run.info.run_id, status, round(1000 * _ended(folder)))
            reaped += 1
    return reaped


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# ------------------------------------------------------------------------------------------------ beside a trial


class Patience:
    """What goes wrong in MLflow is said once, and not tried again at once."""

    def __init__(self) -> None:
        self._not_before = -math.inf
        self._told = False

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._not_before

    @contextmanager
    def guarding(self, what_goes_on: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # whatever a server or a network can do
            now = time.monotonic()
            self._not_before = now + SHARE * (now - began)
            if not self._told:
                said = redacted(" ".join(str(error).split()))[:200]
                warnings.warn(f"MLflow is left aside, {what_goes_on}: {said}", RuntimeWarning, stacklevel=4)
            self._told = True


class Tracker:
    """Called with the folder of a trial whenever there is something new in it; `left` when its process leaves it."""

    def __init__(self, runtime: Runtime) -> None:
        self._on = runtime.tracking == "mlflow"
        self._patience = Patience()
        self._connected: tuple[MlflowClient, str] | None = None
        self._folder: RunFolder | None = None

    def __call__(self, folder: RunFolder) -> None:
        if self._on:
            self._folder = folder
            self._send(folder, "RUNNING")

    def left(self) -> None:
        """A trial that was stopped does not run."""
        if self._folder is not None and self._folder.result() is None:
            self._send(self._folder, "KILLED")

    def _send(self, folder: RunFolder, unless_over: str) -> None:
        result = folder.result()
        if result is None and not self._patience.over:
            return
        with self._patience.guarding("the trial goes on"):
            status = unless_over if result is None else STATUS[result["status"]]
            (client, run), self._connected = self._connected or self._connect(folder), None
            params = about(saved_trial(folder.path)) if (folder.path / "config.yaml").exists() else {}
            send(client, client.get_run(run), folder, status, params, {FOLDER: str(folder.path.resolve())})
            self._connected = client, run  # else the next attempt begins anew

    def _connect(self, folder: RunFolder) -> tuple[MlflowClient, str]:
        runs = folder.path.parent
        uri = tracking_uri(runs)
        client = connect(runs, uri)
        trials = experiment(client, EXPERIMENT, runs, uri)
        tags, owner, key = {"mlflow.source.name": "fewbits train"}, owner_of(runs), {TRIAL: folder.id}
        adopt(client, trials, owner, runs, key)
        run = one_run(client, trials, owner, key, folder.path.name, tags, began(folder))
        return client, run.info.run_id
