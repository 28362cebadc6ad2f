"""Read from a run folder the points (values of metrics) that MLflow shows, step by step.

The points of a step come from the step's row of metrics.parquet, its speed in timing.parquet, the window of
numerics.parquet that ends with the step, and the step's rows of precision.parquet. Training writes timing.parquet last.
While a trial runs, only steps in timing.parquet are read, because their rows in the other tables are complete.
"""

from __future__ import annotations

import io
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fewbits.experiments.storage.evaluations import with_stored
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.tracking import numerics, precision
from fewbits.experiments.tracking.system_metrics import SYSTEM

if TYPE_CHECKING:
    import pandas as pd

SECTIONS = {  # metric: the heading below which MLflow shows its chart (the metric's name becomes `section/name`)
    "gradient_norm": "optimizer",
    "learning_rate": "optimizer",
    "parameter_norm": "optimizer",
    "penalty": "optimizer",
    "loss_scale": "precision",
    "skipped": "precision",
    "tokens_per_second": "speed",
    "mfu": "speed",
}
_SCORES = re.compile(r"(validation|ood)_loss_\w+|\w*_share")  # numbers that are in result.json, but in no table


Summary = dict[int, dict[str, float]]  # step: metrics (name: value)


class Point(NamedTuple):
    """One value of a metric; the fields have the order of MLflow's `Metric`."""

    key: str  # the metric's name
    value: float  # finite
    timestamp: int  # milliseconds since 1970
    step: int


def step_points(folder: RunFolder, after: int) -> Iterator[tuple[int, list[Point]]]:
    """Yield (step, points) for each step after the step `after`; the points are the values of the step's metrics."""
    timing = {row["step"]: row for row in _rows(folder.path / "timing.parquet")}
    last = math.inf if folder.over else max(timing, default=-1)
    rows = [row for row in _rows(folder.path / "metrics.parquet") if after < row["step"] <= last]
    windows = _summary(folder.path / "numerics.parquet", after, numerics.metrics_by_step) if rows else {}
    measured = _summary(folder.path / "precision.parquet", after, precision.metrics_by_step) if rows else {}
    for row in rows:
        step = int(row["step"])
        times = timing.get(step, {})
        values = {key: value for key, value in row.items() if key != "step"}
        values |= {key: times[key] for key in ("tokens_per_second", "mfu") if key in times}
        named = {_in_section(key): value for key, value in values.items()}
        named |= windows.get(step, {}) | measured.get(step, {})
        at = round(1000 * times.get("time", 0.0))
        yield step, [Point(key_of(key), float(v), at, step) for key, v in named.items() if math.isfinite(v)]


def score_points(folder: RunFolder) -> Iterator[Point]:
    """Yield the numbers that are evaluated only at the end of a finished trial, as points at the trial's last step."""
    result = with_stored(folder.path, folder.result() or {})
    if result.get("status") == "done":
        at = round(1000 * ended(folder))
        for name, value in _scores(result):
            if math.isfinite(value):
                yield Point(key_of(name), float(value), at, int(result["step"]))


def system_points(folder: RunFolder, after: int) -> Iterator[tuple[int, list[Point]]]:
    """Yield (number, points) for each sample of system.jsonl except the first `after` ones.

    number: the sample's position in the file, counted from 1; the points have it as their step.
    """
    try:
        lines = (folder.path / SYSTEM).read_text().splitlines()
    except OSError:
        return
    for number, line in enumerate(lines[after:], start=after + 1):
        try:
            sample = dict(json.loads(line))
        except ValueError:  # a worker was killed while it wrote the line
            continue
        at = round(1000 * sample.pop("time"))
        yield number, [Point(key_of(f"system/{name}"), float(v), at, number) for name, v in sample.items()]


def began(folder: RunFolder) -> float:
    """Return when the trial's first step began, in seconds since 1970; the current time if it has no steps."""
    first = next(iter(_rows(folder.path / "timing.parquet")), None)
    return first["time"] - first["seconds"] if first else time.time()


def ended(folder: RunFolder) -> float:
    """Return when the trial ended, in seconds since 1970; if it has not ended, when it last wrote timing.parquet.

    If it has not written this file, return the current time.
    """
    files = [folder.path / name for name in ("result.json", "failure.json", "timing.parquet")]
    return next((file.stat().st_mtime for file in files if file.exists()), time.time())


def key_of(name: str) -> str:
    """Return a metric's or parameter's name with `_` in place of characters that MLflow does not allow."""
    return re.sub(r"[^\w./ -]", "_", name)


def table(path: Path) -> pd.DataFrame | None:
    """Read a Parquet file of a run folder; return None if it is missing or empty; raise ValueError if it is damaged."""
    import pandas as pd

    if not path.exists():
        return None
    content = io.BytesIO(path.read_bytes())  # all bytes at once, because a running trial may replace the file
    try:
        frame = pd.read_parquet(content)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} is damaged ({reason}): remove the run folder that contains it, and run the trial again"
        ) from None
    return frame if len(frame) else None


def _rows(path: Path) -> list[dict[str, float]]:
    frame = table(path)
    return [] if frame is None else [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def _summary(path: Path, after: int, metrics_by_step: Callable[[pd.DataFrame], Summary]) -> Summary:
    """Return the metrics of the steps after `after`, as `metrics_by_step` computes them from rows of a table.

    path: the table, a Parquet file; if it is missing or empty, the result is empty.
    """
    frame = table(path)
    return {} if frame is None else metrics_by_step(frame[frame["step"] > after])


def _in_section(key: str) -> str:
    """Return the name in MLflow of the metric `key`: `section/key` if SECTIONS lists the metric, else `key`."""
    return f"{SECTIONS[key]}/{key}" if key in SECTIONS else key


def _scores(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of each score in `result`, the content of a result.json.

    Scores are the losses that only the evaluation at the end of training computes (such
    as `validation_loss_unquantized`), the values of keys that end with `_share`, and the scores of lm-eval tasks.
    """
    for key, value in result.items():
        if _SCORES.fullmatch(key):
            yield key, value
    for task, metrics in result.get("tasks", {}).items():
        for name, value in metrics.items():
            if value is not None:
                yield f"tasks/{task}/{name.replace(',', '.')}", value
