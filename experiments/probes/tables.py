"""Define `Probe`, the result of a comparison of recipes at a checkpoint: three tables, and summaries of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

WHOLE = "whole"  # in the column `layer`: the row is about all parameters of the model
# The columns that identify a row; all other columns are numbers.
KEYS = ["recipe", "batch", "seed", "layer", "block", "part", "slot", "quantizer", "accumulator"]
SUMS = "sum_error_"  # in summaries, the column `sum_error_NAME` is the error of sums with the accumulator NAME
MEASURES = ["norm", "cosine", "error", "bias", "noise", "systematic"]


@dataclass(frozen=True, eq=False)
class Probe:
    """The results of a probe: what was measured, and tables with a column `recipe`.

    rows      the tables probe.parquet of the recipes: a row for each batch, with the losses and the measures of the
              whole gradient, and one for each batch and layer, with the measures of the weight's gradient
    operands  a row for each layer and slot, with statistics over all batches and seeds; operands in high precision have
              no row. A mixture's `error` is that of its first quantizer, whatever it chose
    sums      a row for each batch, seed, layer and accumulator (sum_errors.py); None without accumulators
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

        Columns: `recipe`; `seeds`, the number of seeds; `increase` of the loss in nats per token; the measures of the
        whole gradient (gradient_errors.py); `worst_layer`, the layer whose weight gradient has the largest `error`
        (mean over batches), and `worst_error`, this `error`; `sum_error_NAME`, the error of sums with the accumulator
        NAME. `increase_se` and `bias_se` are standard errors over batches, NaN for one batch.
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

        Columns: `recipe`, `layer`, `block`, `part`; the measures of the weight's gradient (gradient_errors.py); the
        relative error of each operand, by slot (`fprop.x` …); `sum_error_NAME` for each accumulator. The layer `whole`
        is the gradient of all parameters.
        """
        keys = ["recipe", "layer"]
        labels = {"block": "first", "part": "first"}
        table = self.rows.groupby(keys, sort=False).agg({**labels, **dict.fromkeys(MEASURES, "mean")})
        table = table.join(self.operands.pivot(index=keys, columns="slot", values="error"))
        sums = self._sums(keys)
        return (table if sums is None else table.join(sums)).reset_index()

    def long(self) -> pd.DataFrame:
        """Return all tables as one long table with a row for each number.

        Columns: `recipe`, `batch`, `seed`, `layer`, `block`, `part`, `slot`, `quantizer` and `accumulator`, which
        identify what was measured (missing values where they do not apply); `measure`, the number's name; `value`, the
        number.
        """
        parts = []
        for frame in (
            self.rows.drop(columns="variant"),
            self.operands.drop(columns=["histogram", "step"], errors="ignore"),
            self.sums,
        ):
            if frame is not None and len(frame):
                melted = frame.melt([key for key in KEYS if key in frame], var_name="measure", value_name="value")
                melted["value"] = melted["value"].astype(float)
                parts.append(melted[melted["value"].notna()].reindex(columns=[*KEYS, "measure", "value"]))
        return pd.concat(parts, ignore_index=True).astype(dict.fromkeys(("batch", "seed", "block"), "Int64"))

    def _sums(self, keys: list[str]) -> pd.DataFrame | None:
        if self.sums is None:
            return None
        return (
            self.sums.groupby([*keys, "accumulator"], sort=False)["error"]
            .mean()
            .unstack("accumulator")
            .add_prefix(SUMS)
        )
