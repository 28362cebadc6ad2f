"""Summarize a trial's numerics.parquet for MLflow: a few metrics for each window of steps, instead of a row per layer.

    decisions/FORMAT            share of a mixture's decisions that chose the format: mean over layers and slots
    decisions_FORMAT/SLOT       share of a mixture's decisions that chose the format in this slot: mean over layers
    error/SLOT                  relative error of the quantized operand: mean over layers
    error_max/SLOT              largest relative error of any layer
    flushed/SLOT                share of values that became 0: mean over layers
    saturated/SLOT              share of values that overflowed: mean over layers
    weight_gradient/error       relative error of the weight gradient: mean over layers
    weight_gradient/cosine      cosine of the weight gradient and the exact one: mean over layers
    bits/mean bits/min bits/max learned bit widths of a sampler, over all layers

MLflow shows the chart of a metric `section/name` below the heading `section`. The artifact numerics.parquet contains
the rows of all layers, and the artifact numerics.csv those of the last window, which MLflow's page can show.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import pandas as pd

MEANS = ("error", "flushed", "saturated")  # columns that are averaged over layers, by slot
WEIGHTS = {  # column in rows with the slot `weight`: name of the metric, and how the layers' values are combined
    "gradient_error": ("weight_gradient/error", "mean"),
    "gradient_cosine": ("weight_gradient/cosine", "mean"),
    "bits_mean": ("bits/mean", "mean"),
    "bits_min": ("bits/min", "min"),
    "bits_max": ("bits/max", "max"),
}
SHARE = "share_"  # column `share_i`: the share of a mixture's decisions for its i-th quantizer, from 0

Metrics = dict[str, float]
Value = tuple[int, str, float]  # step, name of the metric, value


def metrics_by_step(rows: pd.DataFrame) -> dict[int, Metrics]:
    """Return the metrics (name: value) of each window, by the window's last step. rows: those of numerics.parquet."""
    metrics: dict[int, Metrics] = {}
    for step, name, value in (*_means(rows), *_weights(rows), *_decisions(rows)):
        if value == value:  # NaN: not measured in this window
            metrics.setdefault(int(step), {})[name] = float(value)
    return metrics


def last_window(rows: pd.DataFrame) -> str:
    """Return the rows of numerics.parquet for the last window as CSV text, without histograms and empty columns."""
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
    """Return the share of each format in a trial's decisions, averaged over windows, layers and slots.

    rows: those of numerics.parquet. The result is empty for a recipe without mixtures.
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
    """Return the shares of formats in mixtures' decisions, with a row for each window, layer and slot.

    rows: those of numerics.parquet. If none of them is about a mixture, return None.

    Columns: `step`, `slot`, and for each format of any mixture its share, 0 if the slot's mixture does not have it.
    """
    import pandas as pd

    columns = [column for column in map(str, rows) if column.startswith(SHARE)]
    if not columns or (decided := rows[rows[columns[0]].notna()]).empty:
        return None
    named = []
    for mixture, of_mixture in decided.groupby("quantizer"):
        # Only the first four quantizers of a mixture have columns.
        names = dict(zip(columns, entry_names(str(mixture)), strict=False))
        named.append(of_mixture[["step", "slot", *columns]].rename(columns=names))
    return pd.concat(named).drop(columns=columns, errors="ignore").fillna(0.0)


def entry_names(mixture: str) -> list[str]:
    """Return a name for each quantizer of a mixture: its format, or its whole text if another one has the same format.

    >>> entry_names("e4m3:128x128:gam @ error<0.045 | bf16 ; per=block")
    ['e4m3', 'bf16']
    """
    entries = [entry.partition(" @ ")[0].strip() for entry in mixture.partition(" ; ")[0].split(" | ")]
    formats = [entry.partition(":")[0] for entry in entries]
    count = Counter(formats)
    return [name if count[name] == 1 else entry for name, entry in zip(formats, entries, strict=True)]
