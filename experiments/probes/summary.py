"""Summarize a probe trial: compute the numbers of its result.json and its table numerics.parquet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fewbits.experiments.probes.tables import WHOLE
from fewbits.experiments.probes.variants import ALL

KEYS = ["layer", "block", "part", "slot", "quantizer"]
MEASURES = ("cosine", "error", "bias", "noise", "systematic")


def summarize(table: pd.DataFrame) -> dict[str, float | None]:
    """Return the numbers of result.json from probe.parquet: means over batches for the recipe (variant `all`).

    A number that cannot be computed or is not finite is None.

    loss, reference      the loss with the recipe and without quantization, in nats per token
    increase             loss − reference; increase_relative: increase / reference
    gradient_…           the measures of the whole gradient (gradient_errors.py)
    gradient_zeros       share of zeros in the recipe's gradient minus share of zeros in the exact gradient
    persistent           squared norm of the gradient error that averaging over batches and seeds does not remove,
                         divided by the squared norm of the mean gradient; both are estimated by products of
                         neighbouring batches (`_across` in probe_trial.py), so that the number can be negative
    update_own,          decrease of the unquantized loss by one update with the recipe's gradient, divided by the
    update_next          decrease with the exact gradient: on the same batch, and on the next batch
    """
    rows = table[(table["variant"] == ALL) & (table["layer"] == WHOLE)]
    numbers: dict[str, float] = {
        "loss": rows["loss"].mean(skipna=False),
        "reference": rows["reference"].mean(skipna=False),
        "increase": rows["increase"].mean(skipna=False),
        "increase_relative": rows["increase"].sum(skipna=False) / rows["reference"].sum(skipna=False),
        **{f"gradient_{name}": rows[name].mean(skipna=False) for name in MEASURES},
        "gradient_zeros": (rows["zeros"] - rows["zeros_exact"]).mean(skipna=False),
    }
    if "cross_error" in rows:
        products = (rows[f"cross_{name}"].iloc[1:] for name in ("error", "gradient"))  # the first row has none
        numbers["persistent"] = _ratio(*(values.sum(skipna=False) for values in products))
    for place in ("own", "next"):
        if f"decrease_{place}_exact" in rows:
            parts = (rows[f"decrease_{place}_{name}"].sum(skipna=False) for name in ("quantized", "exact"))
            numbers[f"update_{place}"] = _ratio(*parts)
    return {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}


def numerics_table(rows: Sequence[dict[str, Any]], step: int) -> pd.DataFrame:
    """Return numerics.parquet: a row for each operand, with its statistics over all batches and seeds.

    rows: the statistics of single batches and seeds.
    step: the checkpoint's step, the number of updates before it. The column `step` has the number of the last of these
        updates, step − 1.
    """
    frame = pd.DataFrame(rows)
    if frame.empty:
        return frame
    tables = []
    for key, group in frame.groupby(KEYS, sort=False, dropna=False):
        counts = group["batches"].to_numpy(np.float64)
        row: dict[str, Any] = {"step": max(step - 1, 0)} | dict(zip(KEYS, key, strict=True))
        row["batches"] = int(counts.sum())
        row |= {name: _mean(group[name], counts) for name in ("error", "flushed", "saturated", "capped")}
        row |= {"error_max": float(group["error_max"].max()), "lost": int(group["lost"].sum())}
        row["histogram"] = np.sum([np.asarray(histogram) for histogram in group["histogram"]], axis=0).tolist()
        shares = [name for name in group if str(name).startswith("share_") and group[name].notna().all()]
        row |= {str(name): _mean(group[name], counts) for name in shares}
        tables.append(row)
    return pd.DataFrame(tables)


def _mean(values: pd.Series, weights: np.ndarray) -> float:
    return float(np.average(values.to_numpy(np.float64), weights=weights))


def _ratio(a: float, b: float) -> float:
    """Return a / b; NaN if b is 0."""
    return a / b if b else math.nan
