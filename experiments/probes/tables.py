"""Summarize probes: the tables of a comparison of recipes (`Probe`), and a probe trial's result.json and numerics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fewbits.experiments.probes.bench import ALL

WHOLE = "whole"  # in the column `layer`: the row is about all parameters of the model
SUMS = "sum_error_"  # in summaries, the column `sum_error_NAME` is the error of sums with the accumulator NAME
OPERAND_KEYS = ["layer", "block", "part", "slot", "quantizer"]  # of numerics.parquet
MEASURES = ["norm", "cosine", "error", "bias", "noise", "systematic"]


@dataclass(frozen=True, eq=False)
class Probe:
    """The results of a probe: what was measured, and tables with a column `recipe`.

    rows      the tables probe.parquet of the recipes: a row for each batch, with the losses and the measures of the
              whole gradient, and one for each batch and layer, with the measures of the weight's gradient
    operands  a row for each layer and slot, with statistics over all batches and seeds; operands in high precision have
              no row. A mixture's `error` is that of its first quantizer, whatever it chose
    sums      a row for each batch, seed, layer and accumulator (errors.py); None without accumulators
    """

    run: str  # the run folder's name
    step: int  # of the checkpoint
    split: str  # from which the batches were read
    batches: int  # the number of batches
    seeds: int  # of a recipe that uses random numbers
    sequences: int  # per batch
    length: int  # tokens per sequence
    dtype: str  # in which the quantized models compute
    reference: str  # the dtype in which the unquantized model computes
    rows: pd.DataFrame
    operands: pd.DataFrame
    sums: pd.DataFrame | None

    @property
    def accumulators(self) -> tuple[str, ...]:
        """The names of the accumulators whose sums were measured."""
        return () if self.sums is None else tuple(dict.fromkeys(map(str, self.sums["accumulator"])))

    def summary(self) -> pd.DataFrame:
        """Return a row for each recipe with means over batches.

        `increase` is that of the loss in nats per token; `worst_layer` is the layer whose weight gradient has the
        largest mean `error`; `sum_error_NAME` is the error of sums with the accumulator NAME. `increase_se` and
        `bias_se` are standard errors over batches, NaN for one batch. The other columns are measures of the whole
        gradient (errors.py).
        """
        rows = []
        for recipe, own in self.rows.groupby("recipe", sort=False):
            whole, layers = own[own["layer"] == WHOLE], own[own["layer"] != WHOLE]
            errors = layers.groupby("layer", sort=False)["error"].mean()
            worst = str(errors.idxmax()) if errors.notna().any() else None
            rows.append(
                {
                    "recipe": recipe,
                    "seeds": 1 if (whole["noise"] == 0).all() else self.seeds,
                    "increase": whole["increase"].mean(),
                    "increase_se": whole["increase"].sem(),
                    **{name: whole[name].mean() for name in ("cosine", "error", "bias")},
                    "bias_se": whole["bias"].sem(),
                    **{name: whole[name].mean(skipna=False) for name in ("noise", "systematic")},
                    "worst_layer": worst,
                    "worst_error": math.nan if worst is None else errors.max(),
                }
            )
        sums = self._sums(["recipe"])
        return pd.DataFrame(rows) if sums is None else pd.DataFrame(rows).join(sums, on="recipe")

    def layers(self) -> pd.DataFrame:
        """Return a row for each recipe and layer, with means over batches and seeds.

        Columns: `recipe`, `layer`, `block`, `part`; the measures of the weight's gradient (errors.py); the relative
        error of each operand, by slot (`fprop.x` …); `sum_error_NAME`. The layer `whole` is the gradient of all
        parameters.
        """
        keys = ["recipe", "layer"]
        labels = {"block": "first", "part": "first"}
        table = self.rows.groupby(keys, sort=False).agg({**labels, **dict.fromkeys(MEASURES, "mean")})
        table = table.join(self.operands.pivot(index=keys, columns="slot", values="error"))
        sums = self._sums(keys)
        return (table if sums is None else table.join(sums)).reset_index()

    def _sums(self, keys: list[str]) -> pd.DataFrame | None:
        if self.sums is None:
            return None
        return (
            self.sums.groupby([*keys, "accumulator"], sort=False)["error"]
            .mean()
            .unstack("accumulator")
            .add_prefix(SUMS)
        )


# ------------------------------------------------------------------------------------------------ a probe trial


def summarize(table: pd.DataFrame) -> dict[str, float | None]:
    """Return the numbers of result.json from probe.parquet: means over batches for the recipe (variant `all`).

    A number that cannot be computed or is not finite is None.

    loss, reference      the loss with the recipe and without quantization, in nats per token
    increase             loss − reference; increase_relative: increase / reference
    gradient_…           the measures of the whole gradient (errors.py)
    gradient_zeros       share of zeros in the recipe's gradient minus share of zeros in the exact gradient
    persistent           squared norm of the gradient error that averaging over batches and seeds does not remove,
                         divided by the squared norm of the mean gradient; both are estimated by products of
                         different batches (`Pairs` in probe_trial.py), so that the number can be negative
    progress             expected decrease of the loss of other batches by a small step along the recipe's gradient,
                         divided by the decrease along the exact gradient, estimated by the same products
    update_own,          decrease of the unquantized loss by one update with the recipe's gradient, mean over seeds,
    update_next          divided by the decrease with the exact gradient: on the same batch, and on the next batch
    """
    rows = table[(table["variant"] == ALL) & (table["layer"] == WHOLE)]
    numbers: dict[str, float] = {
        "loss": rows["loss"].mean(skipna=False),
        "reference": rows["reference"].mean(skipna=False),
        "increase": rows["increase"].mean(skipna=False),
        "increase_relative": rows["increase"].sum(skipna=False) / rows["reference"].sum(skipna=False),
        **{f"gradient_{name}": rows[name].mean(skipna=False) for name in MEASURES if name != "norm"},
        "gradient_zeros": (rows["zeros"] - rows["zeros_exact"]).mean(skipna=False),
    }
    if "cross_error" in rows:
        sums = rows.iloc[1:].sum(skipna=False)  # the first row has no products
        numbers["persistent"] = _ratio(sums["cross_error"], sums["cross_gradient"])
        numbers["progress"] = 1 + _ratio(sums["cross_progress"], sums["cross_gradient"])
    for place in ("own", "next"):
        if f"decrease_{place}_exact" in rows:
            parts = (rows[f"decrease_{place}_{name}"].sum(skipna=False) for name in ("quantized", "exact"))
            numbers[f"update_{place}"] = _ratio(*parts)
    return {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}


def numerics_table(rows: Sequence[dict[str, Any]], step: int) -> pd.DataFrame:
    """Return numerics.parquet: a row for each operand, with its statistics over all batches and seeds.

    rows: the statistics of single batches and seeds. step: the checkpoint's step; the column `step` has the number of
    the last update before it.
    """
    frame = pd.DataFrame(rows)
    if frame.empty:
        return frame
    tables = []
    for key, group in frame.groupby(OPERAND_KEYS, sort=False, dropna=False):
        counts = group["batches"].to_numpy(np.float64)
        row: dict[str, Any] = {"step": max(step - 1, 0)} | dict(zip(OPERAND_KEYS, key, strict=True))
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
