"""Summarize a trial's numerics.parquet and precision.parquet for MLflow: a few metrics for each window of steps.

    share/FORMAT, share_FORMAT/SLOT          share of a mixture's decisions that chose the format, also by slot
    operand_error, _flushed, _saturated/SLOT means over layers; operand_error_max/SLOT: the maximum
    weight_gradient/error, cosine            means over layers
    weight_bits/mean, min, max               learned bit widths of a sampler, over all layers
    precision/lost…, zeros…, nonfinite       see experiments/optimization/update_records.py

MLflow's page shows the chart of a metric `section/name` below the heading
`section`, and always one of the first metric in alphabetical order, so no name is before `loss`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from fewbits.experiments.storage.decisions import decision_shares

if TYPE_CHECKING:
    import pandas as pd

MEANS = ("error", "flushed", "saturated")  # columns that are averaged over layers, by slot
WEIGHTS = {  # column in rows with the slot `weight`: name of the metric, and how the layers' values are combined
    "gradient_error": ("weight_gradient/error", "mean"),
    "gradient_cosine": ("weight_gradient/cosine", "mean"),
    "bits_mean": ("weight_bits/mean", "mean"),
    "bits_min": ("weight_bits/min", "min"),
    "bits_max": ("weight_bits/max", "max"),
}
LOST = ("lost", "lost_bf16", "lost_fp16")

Summary = dict[int, dict[str, float]]  # step: metrics (name: value)
Value = tuple[int, str, float]  # step, name of the metric, value


def numerics_by_step(rows: pd.DataFrame) -> Summary:
    """Return the metrics of each window, by the window's last step. rows: those of numerics.parquet."""
    metrics: Summary = {}
    for step, name, value in (*_means(rows), *_weights(rows), *_decisions(rows)):
        if value == value:  # NaN: not measured in this window
            metrics.setdefault(int(step), {})[name] = float(value)
    return metrics


def precision_by_step(rows: pd.DataFrame) -> Summary:
    """Return the metrics of each measured step. rows: those of precision.parquet.

    A step whose update was skipped, because its gradients overflowed, has no metrics `precision/lost…`.
    """
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


def _means(rows: pd.DataFrame) -> Iterator[Value]:
    measured = rows[rows["slot"] != "weight"]
    aggregates = {column: "mean" for column in MEANS if column in rows}
    aggregates |= {"error_max": "max"} if "error_max" in rows else {}
    if aggregates and len(measured):
        for key, values in measured.groupby(["step", "slot"]).agg(aggregates).iterrows():
            step, slot = cast(tuple[int, str], key)
            yield from ((step, f"operand_{column}/{slot}", value) for column, value in values.items())


def _weights(rows: pd.DataFrame) -> Iterator[Value]:
    of_weights = rows[rows["slot"] == "weight"]
    for column, (name, how) in WEIGHTS.items():
        if column in rows:
            for step, value in of_weights.groupby("step")[column].agg(how).items():
                yield cast(int, step), name, value


def _decisions(rows: pd.DataFrame) -> Iterator[Value]:
    if (shares := decision_shares(rows)) is None:
        return
    for step, values in shares.drop(columns="slot").groupby("step").mean().iterrows():
        yield from ((cast(int, step), f"share/{name}", value) for name, value in values.items())
    for key, values in shares.groupby(["step", "slot"]).mean().iterrows():
        step, slot = cast(tuple[int, str], key)
        yield from ((step, f"share_{name}/{slot}", value) for name, value in values.items())
