"""Create MLflow's SQLite database and add points to it, both faster than MLflow does.

MLflow creates a database with migrations that take seconds. Here this happens once for each version of MLflow, in
fewbits' cache, and then the file is copied. MLflow takes about 80 µs to add a point (one value of a metric), and a
trial has thousands of points. Here points are added by two SQL statements in one transaction. The tables are those of
the MLflow version that this package requires; a test compares the result with what MLflow writes.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fewbits.common.atomic import create_once
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
    """One value of a metric."""

    key: str
    value: float  # finite
    timestamp: int  # milliseconds
    step: int


def path_of(uri: str) -> Path:
    """Return the path of the SQLite file of an MLflow URI."""
    return Path(uri.removeprefix(SCHEME).partition("?")[0])


def make(path: Path) -> None:
    """Create the database if it does not exist, atomically: MLflow would refuse an incomplete one for ever."""
    if path.exists():
        if path.stat().st_size:
            return
        path.unlink()  # SQLite creates an empty file when a deleted database is opened
    create_once(path, _empty().read_bytes())


def _empty() -> Path:
    import mlflow

    def existing(folder: Path) -> Path:
        if not (folder / _EMPTY).exists():
            raise FileNotFoundError(folder)
        return folder / _EMPTY

    def fill(folder: Path) -> None:
        mlflow.MlflowClient(tracking_uri=f"{SCHEME}{folder / _EMPTY}")

    return opened_or_made(cache_folder() / "mlflow" / mlflow.__version__, existing, fill)


def add(uri: str, run: str, points: Iterable[Point]) -> None:
    """Add points to a run, in one transaction. Points that it already has stay unchanged."""
    rows = [(run, *point) for point in points]
    latest: dict[str, tuple[str, str, float, int, int]] = {}
    for row in rows:
        latest[row[1]] = max(row, latest.get(row[1], row), key=lambda row: (row[4], row[3], row[2]))
    with contextlib.closing(sqlite3.connect(path_of(uri), timeout=_BUSY)) as database, database:
        database.executemany(_POINTS, rows)
        database.executemany(_LATEST, latest.values())
