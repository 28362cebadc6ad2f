"""Summarize a probe trial: its numbers in result.json, and the statistics of operands over all batches."""

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
    """Return the numbers of the recipe as a whole, as means over batches; None for a number that is unknown.

    increase             of the loss, in nats per token; increase_relative: relative to the unquantized loss
    gradient_…           the measures of the whole gradient (gradient_errors.py)
    gradient_zeros       share of zeros in the gradient beyond those of the exact gradient
    persistent           squared norm of the error that averaging over batches and draws does not remove, relative to
                         that of the mean gradient; the estimate has no bias, and can be negative
    update_own, _next    decrease of the unquantized loss by one update with the recipe's gradient, relative to the
                         decrease with the exact gradient, on the same batch and on the next one
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
        products = (rows[f"cross_{name}"].iloc[1:] for name in ("error", "gradient"))  # the first batch has none
        numbers["persistent"] = _ratio(*(values.sum(skipna=False) for values in products))
    for place in ("own", "next"):
        if f"decrease_{place}_exact" in rows:
            parts = (rows[f"decrease_{place}_{name}"].sum(skipna=False) for name in ("quantized", "exact"))
            numbers[f"update_{place}"] = _ratio(*parts)
    return {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}


def numerics_table(rows: Sequence[dict[str, Any]], step: int) -> pd.DataFrame:
    """Return the rows of numerics.parquet: for each operand, its statistics over all batches and draws.

    rows: those of single batches. step: the step of the checkpoint, counted as in a training trial's last window.
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
    return a / b if b else math.nan
