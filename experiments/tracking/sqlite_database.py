"""Create MLflow's SQLite database, once and faster than MLflow does.

MLflow creates a database with migrations that take seconds, and fails if two processes do that at once. Here this
happens once for each version of MLflow, in fewbits' cache; then the file is copied. The experiment `Default` of that
file stores artifacts in the working directory of the process that created it. MLflow cannot change this location, so
the copy gets its own by SQL.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from fewbits.common.atomic import create_once
from fewbits.experiments.data.once import opened_or_made
from fewbits.kernels.backends.build import cache_folder

SCHEME = "sqlite:///"
_EMPTY = "mlflow.db"


def path_of(uri: str) -> Path:
    """Return the path of the SQLite file of an MLflow URI."""
    return Path(uri.removeprefix(SCHEME).partition("?")[0])


def make(path: Path, artifacts: Path) -> None:
    """Create the database if it does not exist, atomically: MLflow would refuse an incomplete one for ever.

    The experiment `Default` stores its artifacts in the folder `artifacts`.
    """
    if path.exists():
        if path.stat().st_size:
            return
        path.unlink()  # SQLite creates an empty file when a deleted database is opened
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(_empty().read_bytes())
        database.execute("UPDATE experiments SET artifact_location = ?", (artifacts.resolve().as_uri(),))
        database.commit()
        create_once(path, database.serialize())


def _empty() -> Path:
    import mlflow

    def existing(folder: Path) -> Path:
        if not (folder / _EMPTY).exists():
            raise FileNotFoundError(folder)
        return folder / _EMPTY

    def fill(folder: Path) -> None:
        mlflow.MlflowClient(tracking_uri=f"{SCHEME}{folder / _EMPTY}")

    return opened_or_made(cache_folder() / "mlflow" / mlflow.__version__, existing, fill)
