"""Read from run folders the points (values of metrics) that MLflow shows: those of a trial, and the means of an arm.

The points of a step come from the step's row of metrics.parquet, its speed in timing.parquet, the window of
numerics.parquet that ends with the step, and the step's rows of precision.parquet. Training writes timing.parquet last.
While a trial runs, only steps in timing.parquet are read, because their rows in the other tables are complete.

numerics.parquet and precision.parquet are summarized as a few metrics for each window of steps:

    share/FORMAT, share_FORMAT/SLOT          share of a mixture's decisions that chose the format, also by slot
    operand_error, _flushed, _saturated/SLOT means over layers; operand_error_max/SLOT: the maximum
    weight_gradient/error, cosine            means over layers
    weight_bits/mean, min, max               learned bit widths of a sampler, over all layers
    precision/lost…, zeros…, nonfinite       see experiments/optimization/precision.py

MLflow's page shows the chart of a metric `section/name` below the heading `section`, in alphabetical order, and metrics
without a section at the end. So the losses have a section, and no section's name is before `loss`.
"""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fewbits.experiments.storage.results import DECISIONS, decision_shares, with_stored
from fewbits.experiments.storage.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.entities import Metric

SECTIONS = {  # the heading below which MLflow shows the chart of a metric, which gets the name `section/name`
    "loss": ("loss", "loss_max", "validation_loss", "ood_loss"),
    "optimizer": ("gradient_norm", "learning_rate", "parameter_norm", "penalty"),
    "precision": ("loss_scale", "skipped"),
    "speed": ("tokens_per_second", "mfu"),
}
_SECTION = {name: f"{section}/{name}" for section, names in SECTIONS.items() for name in names}
_SCORES = re.compile(r"(?P<loss>(validation|ood)_loss_\w+)|\w*_share")  # numbers in result.json, but in no table
LOSSES = ("validation_loss", "ood_loss", "loss")  # an arm's metrics over steps
CURVE = 200  # about how many points an arm's training loss has
OPERANDS = {
    "error": "mean",
    "flushed": "mean",
    "saturated": "mean",
    "error_max": "max",
}  # columns: by slot, over layers
WEIGHTS = {  # column in rows with the slot `weight`: name of the metric, and how the layers' values are combined
    "gradient_error": ("weight_gradient/error", "mean"),
    "gradient_cosine": ("weight_gradient/cosine", "mean"),
    "bits_mean": ("weight_bits/mean", "mean"),
    "bits_min": ("weight_bits/min", "min"),
    "bits_max": ("weight_bits/max", "max"),
}
LOST = ("lost", "lost_bf16", "lost_fp16")

Summary = dict[int, dict[str, float]]  # step: metrics (name: value)


# -------------------------------------------------------------------------------- a trial


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
        named = {_SECTION.get(key, key): value for key, value in values.items()} | summaries.get(step, {})
        yield from _points(named, times.get("time", 0.0), step)
    result = with_stored(folder.path, folder.result() or {})
    if result.get("status") == "done":
        at = max((row["time"] for row in timing.values()), default=began(folder))
        found = {key: match for key in result if (match := _SCORES.fullmatch(key))}
        scores = {f"loss/{key}" if match["loss"] else key: result[key] for key, match in found.items()}
        for task, metrics in result.get("tasks", {}).items():  # of lm-eval
            scores |= {f"tasks/{task}/{key.replace(',', '.')}": v for key, v in metrics.items() if v is not None}
        yield from _points(scores, at, int(result["step"]))


def numerics_by_step(rows: pd.DataFrame) -> Summary:
    """Return the metrics of each window, by the window's last step, from rows of numerics.parquet."""
    metrics: Summary = {}

    def add(values: Any, name: str) -> None:
        """Add values by step (and slot, then with `/SLOT` after the name), without those that were not measured."""
        for key, value in values.dropna().items():
            step, slot = key if isinstance(key, tuple) else (key, "")
            metrics.setdefault(int(step), {})[f"{name}/{slot}" if slot else name] = float(value)

    operands, weights = rows[rows["slot"] != "weight"], rows[rows["slot"] == "weight"]
    for column, how in OPERANDS.items():
        if column in rows:
            add(operands.groupby(["step", "slot"])[column].agg(how), f"operand_{column}")
    for column, (name, how) in WEIGHTS.items():
        if column in rows:
            add(weights.groupby("step")[column].agg(how), name)
    if (shares := decision_shares(rows)) is not None:
        for chosen in shares.columns.drop(["step", "slot"]):
            add(shares.groupby("step")[chosen].mean(), f"share/{chosen}")
            add(shares.groupby(["step", "slot"])[chosen].mean(), f"share_{chosen}")
    return metrics


def precision_by_step(rows: pd.DataFrame) -> Summary:
    """Return the metrics of each measured step (without `lost…` if the update was skipped) from precision.parquet."""
    counts = ["values", "zeros", "nonfinite", *(name for name in ("updates", *LOST) if name in rows)]
    metrics: Summary = {}
    for key, count in rows.groupby(["step", "slot"])[counts].sum().iterrows():
        step, slot = cast(tuple[int, str], key)
        of_step = metrics.setdefault(step, {})
        if slot == "dy":
            of_step["precision/zeros_dy"] = float(count["zeros"] / count["values"])
            continue
        of_step |= {f"precision/{name}": float(count[name] / count["values"]) for name in ("zeros", "nonfinite")}
        if count.get("updates"):
            of_step |= {f"precision/{name}": float(count[name] / count["updates"]) for name in LOST}
    return metrics


# -------------------------------------------------------------------------------- an arm


def arm_points(folders: Sequence[RunFolder], after: int, steps: int) -> Iterator[Metric]:
    """Yield means over an arm's trials: of losses, at the steps after `after` that all have, and of final values.

    With two or more trials, `…_sd` is the standard deviation. steps: of a whole trial.
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
        key, means, deviations = _SECTION[name], values.mean(axis=1), values.std(axis=1)
        times = pd.concat([table["time"] for table in tables], axis=1).max(axis=1)
        for step in map(int, values.index):
            if step > after and (name != "loss" or (step + 1) % every == 0 or step + 1 == steps):
                points += _points({key: means[step], f"{key}_sd": deviations[step]}, times[step], step)
    yield from sorted(points, key=lambda point: point.step)

    results = [folder.result() for folder in folders]
    diverged = sum(result is not None and result["status"] == "diverged" for result in results)
    final: dict[str, float] = {"seeds": len(folders)} | ({"diverged": diverged} if diverged else {})
    if None not in results:
        ends = [_final(folder) for folder in folders]
        common = [key for key in ends[0] if all(key in one for one in ends)]
        final |= {key: math.fsum(one[key] for one in ends) / len(ends) for key in common}
    yield from _points(final, max(map(began, folders)), 0)


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


# -------------------------------------------------------------------------------- files


def began(folder: RunFolder) -> float:
    """Return when the trial's first step began, in seconds since 1970; if it has no steps, when the trial started."""
    if rows := _rows(folder.path / "timing.parquet"):
        return rows[0]["time"] - rows[0]["seconds"]
    config = folder.path / "config.yaml"
    return config.stat().st_mtime if config.exists() else time.time()


def ended(folder: RunFolder) -> float:
    """Return when the trial ended or wrote its last steps, in seconds since 1970; else the current time."""
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
    try:  # read all bytes at once, because a running trial may replace the file
        frame = pd.read_parquet(io.BytesIO(path.read_bytes()))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is damaged ({reason}): remove its run folder, and run the trial again") from None
    return frame if len(frame) else None


def _rows(path: Path) -> list[dict[str, float]]:
    frame = table(path)
    return [] if frame is None else [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def _points(values: Mapping[str, Any], at: float, step: int) -> Iterator[Metric]:
    """Yield the finite values as points. at: in seconds since 1970."""
    from mlflow.entities import Metric

    stamp = round(1000 * at)
    return (Metric(key_of(key), float(v), stamp, step) for key, v in values.items() if math.isfinite(v))
