"""Copy run folders to MLflow. The folders' files stay the only source; each row of their tables is sent once.

`send` brings one MLflow run up to date with one folder, from the files alone: config.yaml, metrics.parquet,
timing.parquet, result.json. If MLflow uses an SQLite database, points are written to it directly (mlflow_database.py).
Sending twice, or by two processes, has the same result as sending once: only rows after MLflow's last one are sent,
their times are those of the files, and MLflow merges equal points. So a trial that was killed continues in the same
run, and a run can be created again from the files.

`Tracker` does this while `fewbits train` runs. No failure of MLflow stops a trial: it is reported once and retried
later, and the next trial with the same id sends what is missing.
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
from fewbits.experiments.storage.run_folder import RunFolder, saved_trial
from fewbits.experiments.tracking import mlflow_database
from fewbits.experiments.tracking.mlflow_database import Point
from fewbits.experiments.tracking.mlflow_runs import FOLDER, TRIAL, OwnedRuns
from fewbits.experiments.tracking.owner import owner_of, store_id
from fewbits.experiments.trial import Runtime, Trial
from fewbits.kernels.backends.build import cache_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "fewbits"  # the experiment of trials that belong to no study
DATABASE, ARTIFACTS, LOCK = "mlflow.db", "mlartifacts", ".mlflow.lock"  # in the folder of runs
NO_LOCKS = "if two drivers create the same MLflow run, the next `fewbits sync` keeps one"
BATCH = 1000  # largest number of metrics in one MLflow request; they appear together or not at all
SHARE = 20  # an attempt that failed after 1 s is retried after this many seconds at the earliest
SECTIONS = {  # MLflow shows the chart of a metric `section/name` below the heading `section`
    "gradient_norm": "optimizer",
    "learning_rate": "optimizer",
    "parameter_norm": "optimizer",
    "penalty": "optimizer",
    "tokens_per_second": "speed",
    "mfu": "speed",
}

STATUS = {"done": "FINISHED", "diverged": "FAILED"}  # by status of a result

Row = Mapping[str, float]


# ------------------------------------------------------------------------------------------------ connection


def tracking_uri(runs: Path) -> str:
    """Return MLFLOW_TRACKING_URI, else the URI of the store's own database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{mlflow_database.SCHEME}{default_database(runs)}"


_warned: set[Path] = set()  # databases outside their store that this process has warned about


def default_database(runs: Path) -> Path:
    """Return the path of the store's own database: beside the run folders, except on a network file system.

    SQLite's locks are unreliable there. The database is then in this user's cache folder, under the store's id, and one
    warning says so; every command uses the same path.
    """
    kind = network_kind_of(runs)
    if kind is None:
        return runs.resolve() / DATABASE
    cache = cache_folder().expanduser().resolve()
    path = cache / "mlflow" / "stores" / store_id(runs) / DATABASE
    if path not in _warned:
        _warned.add(path)
        advice = "to share it, set MLFLOW_TRACKING_URI to a server"
        if (of_cache := network_kind_of(cache)) is not None:
            advice = f"it is on {of_cache} too, so set FEWBITS_CACHE to a local folder; {advice}"
        text = f"{runs} is on {kind}, where SQLite is unreliable: MLflow's database is at {path}; {advice}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def connect(runs: Path, uri: str) -> MlflowClient:
    """Return a client; create its database under a lock first, because MLflow cannot create it in parallel."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # MLflow would print the URI with its password at each run's end.
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    import mlflow

    for name, level in (("mlflow", logging.CRITICAL), ("alembic", logging.WARNING)):
        logging.getLogger(name).setLevel(level)  # failures arrive as exceptions and are reported in one line
    if uri.startswith(mlflow_database.SCHEME):
        # open the file for each request: a pooled connection would keep using a deleted or moved file
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
    """Return an experiment's id; create it if needed. Without a server, its artifacts are beside the run folders."""
    existing = client.get_experiment_by_name(name)
    if existing is None:
        location = None if uri.startswith("http") else (runs.resolve() / ARTIFACTS / name).as_uri()
        tags = {"mlflow.experimentKind": "custom_model_development"}  # else MLflow's page asks each user for it
        try:
            return str(client.create_experiment(name, location, tags))
        except Exception:
            existing = client.get_experiment_by_name(name)  # another process was faster
            if existing is None:
                raise
    if existing.lifecycle_stage == "deleted":
        client.restore_experiment(existing.experiment_id)
    return str(existing.experiment_id)


# ------------------------------------------------------------------------------------------------ sending


def send(
    client: MlflowClient,
    run: Run,  # current state in MLflow
    folder: RunFolder,
    status: str,  # MLflow's status
    params: Mapping[str, str],
    tags: Mapping[str, str | None],  # None: delete the tag
) -> None:
    """Send everything that the folder's files have and the MLflow run does not; send the run's status last."""
    run_id = run.info.run_id
    if run.info.lifecycle_stage == "deleted":
        client.restore_run(run_id)
    _describe(client, run, params, tags)
    sent = run.data.metrics
    rows = [row for row in _table(folder.path / "metrics.parquet") if row["tokens"] > sent.get("tokens", 0)]
    result = (folder.result() if status == STATUS["done"] else None) or {}
    scores = {key: value for key, value in _scores(result) if _key(key) not in sent}
    _log(client, run_id, rows, _times(folder), [_point(key, scores[key], _ended(folder), result) for key in scores])
    _keep_config(client, run, folder.path / "config.yaml")
    if run.info.status != status:
        if status == "RUNNING":
            client.update_run(run_id, status=status)
        else:
            client.set_terminated(run_id, status, round(1000 * _ended(folder)))


def _describe(client: MlflowClient, run: Run, params: Mapping[str, str], tags: Mapping[str, str | None]) -> None:
    from mlflow.entities import Param, RunTag

    run_id, current = run.info.run_id, run.data
    new_params = [Param(_key(key), value[:6000]) for key, value in params.items() if _key(key) not in current.params]
    texts = {key: value and value[:5000] for key, value in tags.items()}
    new_tags = [RunTag(key, value) for key, value in texts.items() if value and current.tags.get(key) != value]
    for key in texts:
        if not texts[key] and key in current.tags:
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
    """Store the config as an artifact of the run, once."""
    if not config.exists():
        return
    place = run.info.artifact_uri or ""
    if place.startswith("file://"):
        kept = Path(url2pathname(urlsplit(place).path)) / config.name
        moved = any(above.name == ARTIFACTS and not above.parent.exists() for above in kept.parents)
        if not kept.exists() and not moved:  # the old folder of a moved store is not created again
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(config, kept)
    elif not client.list_artifacts(run.info.run_id):
        client.log_artifact(run.info.run_id, str(config))


def began(folder: RunFolder) -> float:
    """Return when the trial's first step began, or the current time if it has no steps."""
    first = next(iter(_table(folder.path / "timing.parquet")), None)
    return first["time"] - first["seconds"] if first else time.time()


def about(trial: Trial) -> dict[str, str]:
    """Return the parameters that are set for every trial in MLflow."""
    names = {"model": trial.model.name, "recipe": trial.recipe.name, "data": trial.data.kind}
    return {**names, "seed": str(trial.seed)}


def _ended(folder: RunFolder) -> float:
    """Return the time when the trial ended, or when it last wrote its tables."""
    files = [folder.path / name for name in ("result.json", "failure.json", "timing.parquet")]
    return next((file.stat().st_mtime for file in files if file.exists()), time.time())


def _table(path: Path) -> list[dict[str, float]]:
    import pandas as pd

    if not path.exists():
        return []
    table = pd.read_parquet(io.BytesIO(path.read_bytes()))  # read at once, because a running trial may replace the file
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def _times(folder: RunFolder) -> dict[float, Row]:
    return {row["step"]: row for row in _table(folder.path / "timing.parquet")}


def _batches(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Yield groups of rows that each fit into one request; with every row two values of timing.parquet are sent."""
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
    """Yield the scores that are evaluated only at the end of a trial."""
    for key, value in result.items():
        if key.endswith("_cloze"):
            yield key, value["accuracy"]
    for task, metrics in result.get("tasks", {}).items():
        for name, value in metrics.items():
            if value is not None:
                yield f"tasks/{task}/{name.replace(',', '.')}", value


def _key(name: str) -> str:
    """Replace the characters of a name that MLflow does not allow."""
    return re.sub(r"[^\w./ -]", "_", name)


def reap(client: MlflowClient, runs: Path) -> int:
    """End MLflow runs that are marked as running although their `fewbits train` was killed; return how many.

    Only runs of this user, this store and this host count.
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
            client.set_terminated(run.info.run_id, status, round(1000 * _ended(folder)))
            reaped += 1
    return reaped


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# ------------------------------------------------------------------------------------------------ while a trial runs


class Patience:
    """A guard for calls of MLflow: it reports the first failure, and after each failure delays the next attempt."""

    def __init__(self) -> None:
        self._not_before = -math.inf
        self._reported = False

    @property
    def over(self) -> bool:
        """Tell whether the next attempt may start."""
        return time.monotonic() >= self._not_before

    @contextmanager
    def guarding(self, consequence: str) -> Iterator[None]:
        """Turn an exception in the `with` block into a warning that states the consequence; warn only once."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # any failure of a server or a network
            now = time.monotonic()
            self._not_before = now + SHARE * (now - began)
            if not self._reported:
                reason = redacted(" ".join(str(error).split()))[:200]
                warnings.warn(f"MLflow was not updated, but {consequence}: {reason}", RuntimeWarning, stacklevel=4)
            self._reported = True


class Tracker:
    """A callback that sends a trial's folder to MLflow when it has changed; call `left` when training ends."""

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
        """Mark the trial as stopped in MLflow if it has no result."""
        if self._folder is not None and self._folder.result() is None:
            self._send(self._folder, "KILLED")

    def _send(self, folder: RunFolder, status_without_result: str) -> None:
        result = folder.result()
        if result is None and not self._patience.over:
            return
        with self._patience.guarding("the trial goes on"):
            status = status_without_result if result is None else STATUS[result["status"]]
            (client, run), self._connected = self._connected or self._connect(folder), None
            params = about(saved_trial(folder.path)) if (folder.path / "config.yaml").exists() else {}
            send(client, client.get_run(run), folder, status, params, {FOLDER: str(folder.path.resolve())})
            self._connected = client, run  # after a failure the next attempt connects again

    def _connect(self, folder: RunFolder) -> tuple[MlflowClient, str]:
        runs = folder.path.parent
        uri = tracking_uri(runs)
        client = connect(runs, uri)
        trials = OwnedRuns(client, experiment(client, EXPERIMENT, runs, uri), owner_of(runs))
        trials.adopt(runs, {TRIAL: folder.id})
        source = {"mlflow.source.name": "fewbits train"}
        run = trials.one({TRIAL: folder.id}, folder.path.name, source, began(folder))
        return client, run.info.run_id
