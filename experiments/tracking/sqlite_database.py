"""Create MLflow's SQLite database, once and faster than MLflow does.

MLflow creates a database by migrations that take seconds, and fails if two processes do this at the same time. fewbits
lets MLflow create one empty database for each version of MLflow, in fewbits' cache, and copies this file. In the file,
the artifact folder of the experiment `Default` is in the working directory of the process that created the file. MLflow
offers no way to change this folder, so fewbits changes it in the copy by SQL.
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
    """Return the path of the SQLite file that an MLflow URI `sqlite:///PATH` names."""
    return Path(uri.removeprefix(SCHEME).partition("?")[0])


def make(path: Path, artifacts: Path) -> None:
    """Create the database at `path` if it does not exist or is empty.

    This is atomic, because MLflow would always refuse an incomplete database. artifacts: the folder in which the
    experiment `Default` stores its artifacts.
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
    """Return the path of an empty database of the installed MLflow, in the cache; create it if needed."""
    import mlflow

    def existing(folder: Path) -> Path:
        if not (folder / _EMPTY).exists():
            raise FileNotFoundError(folder)
        return folder / _EMPTY

    def fill(folder: Path) -> None:
        mlflow.MlflowClient(tracking_uri=f"{SCHEME}{folder / _EMPTY}")

    return opened_or_made(cache_folder() / "mlflow" / mlflow.__version__, existing, fill)
