"""Connect to MLflow: name the owner of runs, choose the URI, create database and experiments, survive failures.

The owner is a store and a user: several users may use one store, and several stores one server, and fewbits changes and
deletes only runs of its own owner. The store's id is a random number in the file `.store.json`, so it does not depend
on the path of the store, and a copy of a store has the same id.
"""

from __future__ import annotations

import getpass
import logging
import math
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fewbits.common.atomic import create_once, read_json
from fewbits.common.process import extras
from fewbits.common.process import locked as flocked
from fewbits.common.wording import redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient

DATABASE, ARTIFACTS, LOCK = "mlflow.db", "mlartifacts", ".mlflow.lock"  # files and folders in the store
SQLITE = "sqlite:///"
NO_LOCKS = "if two drivers create the same MLflow run, the next one keeps only one of the two"
SHARE = 20  # after a failed attempt, the next one waits for at least this many times the duration of the failed one
FILE = ".store.json"  # in the store's folder
STORE, USER = "fewbits.store", "fewbits.user"  # tags of every MLflow run that fewbits creates


def owner_of(runs: Path) -> dict[str, str]:
    """Return the tags (name: value) that identify the MLflow runs of this user and the store `runs`."""
    return {STORE: store_id(runs), USER: user()}


def user() -> str:
    """Return FEWBITS_USER, else MLFLOW_TRACKING_USERNAME, else the system's user; raise ValueError for quotes in it."""
    named = [(name, os.environ.get(name, "").strip()) for name in ("FEWBITS_USER", "MLFLOW_TRACKING_USERNAME")]
    try:
        named.append(("the user's name", getpass.getuser()))
    except (KeyError, OSError, ImportError):  # in a container, the user's id may have no name
        named.append(("the user's name", f"uid-{os.getuid()}"))
    variable, name = next(pair for pair in named if pair[1])
    if not re.fullmatch(r"[^'\"`%\x00-\x1f\x7f]{1,80}", name):
        raise ValueError(
            f"{variable} {name!r}: set FEWBITS_USER to at most 80 characters without quotes, % and control characters"
        )
    return name


def store_id(runs: Path) -> str:
    """Return the id of the store `runs` from its `.store.json`; create the file if it does not exist."""
    path = runs / FILE
    if not path.exists():
        runs.mkdir(parents=True, exist_ok=True)
        create_once(path, f'{{"id": "{secrets.token_hex(8)}"}}\n'.encode())
    identifier = (read_json(path) or {}).get("id")
    if not isinstance(identifier, str) or not re.fullmatch(r"[0-9a-f]{16}", identifier):
        raise ValueError(f'{path} has no valid id, {{"id": "<16 hexadecimal digits>"}}: restore or remove the file')
    return identifier


def tracking_uri(runs: Path) -> str:
    """Return MLFLOW_TRACKING_URI, or if it is not set, the URI of the database of the store `runs`."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{runs.resolve() / DATABASE}"


def connect(runs: Path, uri: str) -> MlflowClient:
    """Return a client for an MLflow URI; if an SQLite database does not exist, create it under the store's lock."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # Without this variable, MLflow prints the URI with its password at the end of each run.
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    with extras():
        import mlflow
    for name, level in (("mlflow", logging.CRITICAL), ("alembic", logging.WARNING)):
        logging.getLogger(name).setLevel(level)  # failures raise exceptions, which are reported in one line
    if uri.startswith(SQLITE):
        # Open the file for each request: a pooled connection would go on using a file after it is deleted or moved.
        os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
        runs.mkdir(parents=True, exist_ok=True)
        with locked(runs):
            _create(Path(uri.removeprefix(SQLITE).partition("?")[0]))
    return mlflow.MlflowClient(tracking_uri=uri)


def _create(path: Path) -> None:
    """Create MLflow's SQLite database if it does not exist: atomically, since MLflow refuses an incomplete one."""
    if path.exists() and path.stat().st_size:  # SQLite creates an empty file when a deleted database is opened
        return
    import mlflow

    with TemporaryDirectory(prefix=".mlflow-", dir=path.parent) as folder:
        mlflow.MlflowClient(tracking_uri=f"{SQLITE}{folder}/{path.name}").search_experiments()
        os.replace(Path(folder) / path.name, path)


@contextmanager
def locked(runs: Path) -> Iterator[None]:
    """Let only one process at a time write to MLflow for the store `runs`."""
    with (runs / LOCK).open("a") as lock, flocked(lock, NO_LOCKS):
        yield


def experiment(client: MlflowClient, name: str, runs: Path, uri: str) -> str:
    """Return the id of an MLflow experiment; create or restore it. Without a server, its artifacts are in the store."""
    existing = client.get_experiment_by_name(name)
    if existing is None:
        location = None if uri.startswith("http") else (runs.resolve() / ARTIFACTS / name).as_uri()
        tags = {"mlflow.experimentKind": "custom_model_development"}  # without it, MLflow's page asks each user
        try:
            return str(client.create_experiment(name, location, tags))
        except Exception:
            existing = client.get_experiment_by_name(name)  # another process may have created it in the meantime
            if existing is None:
                raise
    if existing.lifecycle_stage == "deleted":
        client.restore_experiment(existing.experiment_id)
    return str(existing.experiment_id)


class Patience:
    """Guards calls of MLflow: reports only the first failure, and delays the next call after a slow failure."""

    _not_before, _reported = -math.inf, False

    @property
    def may_retry(self) -> bool:
        """True if the delay after the last failure, SHARE times as long as the failed call took, is over."""
        return time.monotonic() >= self._not_before

    @contextmanager
    def guarding(self, consequence: str) -> Iterator[None]:
        """Suppress exceptions of the `with` block: the first becomes a warning, which ends with `consequence`."""
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
