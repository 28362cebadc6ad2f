"""MLflow's SQLite database where MLflow itself is slow: it is made as a copy of an empty one, and takes points in bulk.

Making one takes MLflow seconds of migrations; done once for each version, into the cache, it is a copy. A point that
goes through MLflow costs some 80 µs of Python objects, and a trial has thousands: here they are two statements in one
transaction. The tables are those of the MLflow version that this package asks for, and a test compares what comes of
it with what MLflow writes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fewbits.experiments.data.once import opened_or_made
from fewbits.kernels.backends.build import cache_folder

SCHEME = "sqlite:///"
_EMPTY = "mlflow.db"
_BUSY = 60.0  # seconds to wait for other writers
_POINTS = """
    INSERT OR IGNORE INTO metrics (run_uuid, key, value, timestamp, step, is_nan) VALUES (?, ?, ?, ?, ?, 0)
"""
_LATEST = """
    INSERT INTO latest_metrics (run_uuid, key, value, timestamp, step, is_nan) VALUES (?, ?, ?, ?, ?, 0)
    ON CONFLICT (key, run_uuid) DO UPDATE
    SET value = excluded.value, timestamp = excluded.timestamp, step = excluded.step, is_nan = 0
    WHERE (excluded.step, excluded.timestamp, excluded.value) > (step, timestamp, value)
"""


class Point(NamedTuple):
    key: str
    value: float  # finite
    timestamp: int  # milliseconds
    step: int


def path_of(uri: str) -> Path:
    return Path(uri.removeprefix(SCHEME).partition("?")[0])


def make(path: Path) -> None:
    """If it is not there; whole or not at all: one whose making was cut short, MLflow would refuse for ever."""
    if path.exists():
        if path.stat().st_size:
            return
        path.unlink()  # of nothing: SQLite makes that of a database which was deleted, when it is looked into
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        shutil.copyfile(_empty(), partial)
        with contextlib.suppress(FileExistsError):  # another store's process was faster
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _empty() -> Path:
    import mlflow

    def there(folder: Path) -> Path:
        if not (folder / _EMPTY).exists():
            raise FileNotFoundError(folder)
        return folder / _EMPTY

    def fill(folder: Path) -> None:
        mlflow.MlflowClient(tracking_uri=f"{SCHEME}{folder / _EMPTY}")

    return opened_or_made(cache_folder() / "mlflow" / mlflow.__version__, there, fill)


def add(uri: str, run: str, points: Iterable[Point]) -> None:
    """To a run: all of them or none. Those that are there already stay as they are."""
    rows = [(run, *point) for point in points]
    latest: dict[str, tuple[str, str, float, int, int]] = {}
    for row in rows:
        latest[row[1]] = max(row, latest.get(row[1], row), key=lambda row: (row[4], row[3], row[2]))
    with contextlib.closing(sqlite3.connect(path_of(uri), timeout=_BUSY)) as database, database:
        database.executemany(_POINTS, rows)
        database.executemany(_LATEST, latest.values())
