"""Define `Probe`, the result of a probe: four tables, whose columns probe.py describes, and summaries of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

WHOLE = "whole"  # in the column `layer`: the row is about all parameters of the model
# The columns that identify a row; all other columns are numbers.
KEYS = ["recipe", "batch", "seed", "layer", "block", "part", "slot", "quantizer", "accumulator"]
SUMS = "sum_error_"  # in summaries, the column `sum_error_NAME` is the error of sums with the accumulator NAME


@dataclass(frozen=True, eq=False)
class Probe:
    """The results of a probe: what was measured, and four tables, whose columns probe.py describes."""

    run: str  # the run folder's name
    step: int  # of the checkpoint
    split: str  # from which the batches were read
    batches: int  # the number of batches
    sequences: int  # per batch
    length: int  # tokens per sequence
    dtype: str  # in which the quantized models compute
    reference: str  # the dtype in which the unquantized model computes
    loss: pd.DataFrame
    gradients: pd.DataFrame
    operands: pd.DataFrame
    sums: pd.DataFrame  # empty if the probe was called without accumulators

    @property
    def accumulators(self) -> tuple[str, ...]:
        """The names of the accumulators whose sums were measured."""
        return tuple(dict.fromkeys(map(str, self.sums["accumulator"])))

    def summary(self) -> pd.DataFrame:
        """Return a row for each recipe with means over batches.

        Columns: `recipe`; `seeds`, the number of seeds; `increase` of the loss in nats per token; the measures of the
        whole gradient (gradient_errors.py); `worst_layer`, the layer whose weight gradient has the largest `error`
        (mean over batches), and `worst_error`, this `error`; `sum_error_NAME`, the error of sums with the accumulator
        NAME. `increase_se` and `bias_se` are standard errors over batches, NaN for one batch.
        """
        rows = []
        for recipe, losses in self.loss.groupby("recipe", sort=False):
            increase = losses.groupby("batch")["increase"].mean()
            gradients = self.gradients[self.gradients["recipe"] == recipe]
            whole = gradients[gradients["layer"] == WHOLE]
            sums = self.sums[self.sums["recipe"] == recipe].groupby("accumulator", sort=False)["error"].mean()
            errors = gradients[gradients["layer"] != WHOLE].groupby("layer", sort=False)["error"].mean()
            worst = str(errors.idxmax()) if errors.notna().any() else None
            rows.append(
                {
                    "recipe": recipe,
                    "seeds": losses["seed"].nunique(),
                    "increase": increase.mean(),
                    "increase_se": increase.sem(),
                    **{name: whole[name].mean() for name in ("cosine", "error", "bias")},
                    "bias_se": whole["bias"].sem(),
                    **{name: whole[name].mean(skipna=False) for name in ("noise", "systematic")},
                    "worst_layer": worst,
                    "worst_error": math.nan if worst is None else errors.max(),
                    **{f"{SUMS}{name}": error for name, error in sums.items()},
                }
            )
        return pd.DataFrame(rows)

    def layers(self) -> pd.DataFrame:
        """Return a row for each recipe and layer, with means over batches and seeds.

        Columns: `recipe`, `layer`, `block`, `part`; the measures of the weight's gradient (gradient_errors.py); the
        relative error of each operand, by slot (`fprop.x` …); `sum_error_NAME` for each accumulator. The layer `whole`
        is the gradient of all parameters.
        """
        keys = ["recipe", "layer"]
        labels = {"block": "first", "part": "first"}
        measures = ["norm", "cosine", "error", "bias", "noise", "systematic"]
        gradients = self.gradients.groupby(keys, sort=False).agg({**labels, **dict.fromkeys(measures, "mean")})
        errors = self.operands.groupby([*keys, "slot"], sort=False)["error"].mean().unstack("slot")
        sums = self.sums.groupby([*keys, "accumulator"], sort=False)["error"].mean().unstack("accumulator")
        return gradients.join(errors).join(sums.add_prefix(SUMS)).reset_index()

    def long(self) -> pd.DataFrame:
        """Return all four tables as one long table with a row for each number.

        Columns: `recipe`, `batch`, `seed`, `layer`, `block`, `part`, `slot`, `quantizer` and `accumulator`, which
        identify what was measured (missing values where they do not apply); `measure`, the number's name; `value`, the
        number.
        """
        parts = []
        for frame in (self.loss, self.gradients, self.operands, self.sums):
            melted = frame.melt([key for key in KEYS if key in frame], var_name="measure", value_name="value")
            melted["value"] = melted["value"].astype(float)
            absent = melted["measure"].str.startswith(("share_", "bits")) & melted["value"].isna()
            parts.append(melted[~absent].reindex(columns=[*KEYS, "measure", "value"]))
        return pd.concat(parts, ignore_index=True).astype(dict.fromkeys(("batch", "seed", "block"), "Int64"))
