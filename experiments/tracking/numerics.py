"""Summarize a trial's numerics.parquet for MLflow: a few metrics for each window of steps, instead of a row per layer.

    decisions/FORMAT            share of a mixture's decisions that chose the format; mean over layers and slots
    decisions_FORMAT/SLOT       the same for one operand slot
    error/SLOT                  relative error of the quantized operand: mean over layers
    error_max/SLOT              largest relative error of any layer
    flushed/SLOT saturated/SLOT shares of values that became 0, or overflowed: means over layers
    weight_gradient/error       relative error of the weight gradients; weight_gradient/cosine: their cosine
    bits/mean bits/min bits/max learned bit widths of a sampler, over all layers

MLflow shows the charts of `section/name` below the heading `section`. The rows of all layers are in the artifact
numerics.parquet, those of the last window also in numerics.csv, which MLflow's page can show.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import pandas as pd

MEANS = ("error", "flushed", "saturated")  # columns that are averaged over layers, by slot
WEIGHTS = {  # columns of the slot `weight`: name of the metric, and how layers are combined
    "gradient_error": ("weight_gradient/error", "mean"),
    "gradient_cosine": ("weight_gradient/cosine", "mean"),
    "bits_mean": ("bits/mean", "mean"),
    "bits_min": ("bits/min", "min"),
    "bits_max": ("bits/max", "max"),
}
SHARE = "share_"  # prefix of the columns with a mixture's decisions

Metrics = dict[str, float]
Value = tuple[int, str, float]  # step, name of the metric, value


def metrics_by_step(rows: pd.DataFrame) -> dict[int, Metrics]:
    """Return the metrics of each window, by the window's last step. rows: those of numerics.parquet."""
    metrics: dict[int, Metrics] = {}
    for step, name, value in (*_means(rows), *_weights(rows), *_decisions(rows)):
        if value == value:  # NaN: not measured in this window
            metrics.setdefault(int(step), {})[name] = float(value)
    return metrics


def last_window(rows: pd.DataFrame) -> str:
    """Return the rows of the last window as CSV, without the histograms."""
    last = rows[rows["step"] == rows["step"].max()]
    return str(last.drop(columns="histogram", errors="ignore").dropna(axis="columns", how="all").to_csv(index=False))


def _means(rows: pd.DataFrame) -> Iterator[Value]:
    measured = rows[rows["slot"] != "weight"]
    aggregates = {column: "mean" for column in MEANS if column in rows}
    aggregates |= {"error_max": "max"} if "error_max" in rows else {}
    if aggregates and len(measured):
        for key, values in measured.groupby(["step", "slot"]).agg(aggregates).iterrows():
            step, slot = cast(tuple[int, str], key)
            yield from ((step, f"{column}/{slot}", value) for column, value in values.items())


def _weights(rows: pd.DataFrame) -> Iterator[Value]:
    of_weights = rows[rows["slot"] == "weight"]
    for column, (name, how) in WEIGHTS.items():
        if column in rows:
            for step, value in of_weights.groupby("step")[column].agg(how).items():
                yield cast(int, step), name, value


def mean_decisions(rows: pd.DataFrame) -> Metrics:
    """Return the share of each format in all decisions of a trial; windows, layers and slots have equal weight.

    It is empty for a recipe without mixtures.
    """
    if (shares := _shares(rows)) is None:
        return {}
    formats = shares.drop(columns=["step", "slot"])
    return {str(name): math.fsum(values) / len(values) for name, values in formats.items()}


def _decisions(rows: pd.DataFrame) -> Iterator[Value]:
    if (shares := _shares(rows)) is None:
        return
    for step, values in shares.drop(columns="slot").groupby("step").mean().iterrows():
        yield from ((cast(int, step), f"decisions/{name}", value) for name, value in values.items())
    for key, values in shares.groupby(["step", "slot"]).mean().iterrows():
        step, slot = cast(tuple[int, str], key)
        yield from ((step, f"decisions_{name}/{slot}", value) for name, value in values.items())


def _shares(rows: pd.DataFrame) -> pd.DataFrame | None:
    """Return a row for each window, layer and slot with decisions: the share of each format of all mixtures."""
    import pandas as pd

    columns = [column for column in map(str, rows) if column.startswith(SHARE)]
    if not columns or (decided := rows[rows[columns[0]].notna()]).empty:
        return None
    named = []
    for mixture, of_mixture in decided.groupby("quantizer"):
        names = dict(zip(columns, entry_names(str(mixture)), strict=False))  # entries after the fourth have no column
        named.append(of_mixture[["step", "slot", *columns]].rename(columns=names))
    return pd.concat(named).drop(columns=columns, errors="ignore").fillna(0.0)


def entry_names(mixture: str) -> list[str]:
    """Return a name for each entry of a mixture: its format, or the whole quantizer where formats repeat.

    >>> entry_names("e4m3:128x128:gam @ error<0.045 | bf16 ; per=block")
    ['e4m3', 'bf16']
    """
    entries = [entry.partition(" @ ")[0].strip() for entry in mixture.partition(" ; ")[0].split(" | ")]
    formats = [entry.partition(":")[0] for entry in entries]
    count = Counter(formats)
    return [name if count[name] == 1 else entry for name, entry in zip(formats, entries, strict=True)]
