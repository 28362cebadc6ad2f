"""Read from run folders the points (values of metrics) that MLflow shows: those of a trial, and the means of an arm.

The points of a step come from the step's row of metrics.parquet, its speed in timing.parquet, the window of
numerics.parquet that ends with the step, and the step's rows of precision.parquet. Training writes timing.parquet last.
While a trial runs, only steps in timing.parquet are read, because their rows in the other tables are complete.
"""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.experiments.storage.decisions import KEY as DECISIONS
from fewbits.experiments.storage.evaluations import with_stored
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.tracking.numerics import Summary, numerics_by_step, precision_by_step

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.entities import Metric

SECTIONS = {  # the heading below which MLflow shows the chart of a metric, which gets the name `section/name`
    "optimizer": ("gradient_norm", "learning_rate", "parameter_norm", "penalty"),
    "precision": ("loss_scale", "skipped"),
    "speed": ("tokens_per_second", "mfu"),
}
_SECTION = {name: f"{section}/{name}" for section, names in SECTIONS.items() for name in names}
_SCORES = re.compile(r"(validation|ood)_loss_\w+|\w*_share")  # numbers that are in result.json, but in no table
LOSSES = ("validation_loss", "ood_loss", "loss")  # an arm's metrics over steps
CURVE = 200  # about how many points an arm's training loss has


def trial_points(folder: RunFolder, after: int) -> Iterator[Metric]:
    """Yield the points of all steps after the step `after`, and at the end the scores of a finished trial."""
    timing = {row["step"]: row for row in _rows(folder.path / "timing.parquet")}
    last = math.inf if folder.over else max(timing, default=-1)
    rows = [row for row in _rows(folder.path / "metrics.parquet") if after < row["step"] <= last]
    summaries: Summary = {}
    for name, by_step in (("numerics", numerics_by_step), ("precision", precision_by_step)):
        if rows and (frame := table(folder.path / f"{name}.parquet")) is not None:
            for step, metrics in by_step(frame[frame["step"] > after]).items():
                summaries.setdefault(step, {}).update(metrics)
    for row in rows:
        step = int(row["step"])
        times = timing.get(step, {})
        values = {key: value for key, value in row.items() if key != "step"}
        values |= {key: times[key] for key in ("tokens_per_second", "mfu") if key in times}
        named = {_SECTION.get(key, key): value for key, value in values.items()}
        named |= summaries.get(step, {})
        yield from _points(named, round(1000 * times.get("time", 0.0)), step)
    result = with_stored(folder.path, folder.result() or {})
    if result.get("status") == "done":
        at = max((row["time"] for row in timing.values()), default=began(folder))
        yield from _points(_scores(result), round(1000 * at), int(result["step"]))


def arm_points(folders: Sequence[RunFolder], after: int, steps: int) -> Iterator[Metric]:
    """Yield the means of the losses over an arm's trials, at steps after `after` that all have, and of other values.

    With two or more trials, `…_sd` is the standard deviation. steps: of a whole trial, of which a running one has some.
    """
    import pandas as pd

    tables = [_losses(folder) for folder in folders]
    every = max(1, steps // CURVE)
    points: list[Metric] = []
    for name in LOSSES:
        columns = [table[name].dropna() for table in tables if name in table]
        if len(columns) < len(tables) or not columns:
            continue
        values = pd.concat(columns, axis=1, join="inner")
        means, deviations = values.mean(axis=1), values.std(axis=1)
        times = pd.concat([table["time"] for table in tables], axis=1).max(axis=1)
        for step in map(int, values.index):
            if step > after and (name != "loss" or (step + 1) % every == 0 or step + 1 == steps):
                at = {name: means[step], f"{name}_sd": deviations[step]}
                points += _points(at, round(1000 * times[step]), step)
    yield from sorted(points, key=lambda point: point.step)
    yield from _values(folders)


def _values(folders: Sequence[RunFolder]) -> Iterator[Metric]:
    """Yield the number of an arm's trials, and if all have ended, how many diverged and the means of final values."""
    at, results = round(1000 * max(map(began, folders))), [folder.result() for folder in folders]
    diverged = sum(result is not None and result["status"] == "diverged" for result in results)
    yield from _points({"seeds": len(folders)} | ({"diverged": diverged} if diverged else {}), at, 0)
    if None not in results:
        values = [_final(folder) for folder in folders]
        common = [key for key in values[0] if all(key in one for one in values)]
        means = {key: math.fsum(one[key] for one in values) / len(values) for key in common}
        yield from _points(means, at, 0)


def _final(folder: RunFolder) -> dict[str, float]:
    """Return the tokens, the shares of formats in a mixture's decisions, and a sampler's bits at the end of a trial."""
    metrics, windows = (table(folder.path / f"{name}.parquet") for name in ("metrics", "numerics"))
    values = {} if metrics is None or "tokens" not in metrics else {"tokens": float(metrics["tokens"].iloc[-1])}
    values |= {f"share_{name}": share for name, share in (folder.result() or {}).get(DECISIONS, {}).items()}
    if windows is not None:
        (last,) = numerics_by_step(windows[windows["step"] == windows["step"].max()]).values() or ({},)
        values |= {"weight_bits": last["weight_bits/mean"]} if "weight_bits/mean" in last else {}
    return values


def _losses(folder: RunFolder) -> pd.DataFrame:
    """Return the losses of the steps that are complete, and the steps' times, by step."""
    import pandas as pd

    rows, timing = table(folder.path / "metrics.parquet"), table(folder.path / "timing.parquet")
    if rows is None:
        return pd.DataFrame()
    rows = rows.set_index("step").replace([math.inf, -math.inf], math.nan)
    times = pd.Series(dtype=float) if timing is None else timing.set_index("step")["time"]
    rows["time"] = times.reindex(rows.index)
    return rows.fillna({"time": 0.0}) if folder.over else rows[rows["time"].notna()]


def began(folder: RunFolder) -> float:
    """Return when the trial's first step began, in seconds since 1970; if it has no steps, when the trial started."""
    if rows := _rows(folder.path / "timing.parquet"):
        return rows[0]["time"] - rows[0]["seconds"]
    config = folder.path / "config.yaml"
    return config.stat().st_mtime if config.exists() else time.time()


def ended(folder: RunFolder) -> float:
    """Return when the trial ended or last wrote timing.parquet, in seconds since 1970; else the current time."""
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


def _points(values: Mapping[str, Any], timestamp: int, step: int) -> Iterator[Metric]:
    from mlflow.entities import Metric

    finite = {key: float(value) for key, value in values.items() if math.isfinite(value)}
    return (Metric(key_of(key), value, timestamp, step) for key, value in finite.items())


def _rows(path: Path) -> list[dict[str, float]]:
    frame = table(path)
    return [] if frame is None else [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def _scores(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores in a result.json: of lm-eval tasks, losses of the last evaluation, shares."""
    scores = {key: value for key, value in result.items() if _SCORES.fullmatch(key)}
    tasks = result.get("tasks", {}).items()
    named = ((task, name, value) for task, metrics in tasks for name, value in metrics.items() if value is not None)
    return scores | {f"tasks/{task}/{name.replace(',', '.')}": value for task, name, value in named}
