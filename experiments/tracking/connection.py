"""Connect to MLflow: choose its URI, create its database and experiments, and lock them against other processes."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.common.file_systems import network_kind_of
from fewbits.common.locks import locked as flocked
from fewbits.common.redaction import redacted
from fewbits.experiments.tracking import sqlite_database
from fewbits.experiments.tracking.owner import store_id
from fewbits.kernels.backends.build import cache_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

DATABASE, ARTIFACTS, LOCK = "mlflow.db", "mlartifacts", ".mlflow.lock"  # in the folder of runs
NO_LOCKS = "if two drivers create the same MLflow run, the next `fewbits sync` keeps one"
SHARE = 20  # an attempt that failed after 1 s is retried after this many seconds at the earliest


def tracking_uri(runs: Path) -> str:
    """Return MLFLOW_TRACKING_URI, else the URI of the store's own database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{sqlite_database.SCHEME}{default_database(runs)}"


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
    if uri.startswith(sqlite_database.SCHEME):
        # open the file for each request: a pooled connection would keep using a deleted or moved file
        os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
        runs.mkdir(parents=True, exist_ok=True)
        with locked(runs):
            sqlite_database.make(sqlite_database.path_of(uri), runs / ARTIFACTS / "Default")
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
