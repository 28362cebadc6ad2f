"""Hold the tables of a probe, and compute views of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

WHOLE = "whole"  # used as a layer's name: all parameters of the model
# Columns that identify a row
KEYS = ["recipe", "batch", "seed", "layer", "block", "part", "slot", "quantizer", "accumulator"]
SUMS = "sum_error_"  # the start of the columns with errors of sums in the views; an accumulator's name follows


@dataclass(frozen=True, eq=False)
class Probe:
    """The results of a probe, with its run, step, batches and reference."""

    run: str  # the run folder's name
    step: int
    split: str
    batches: int
    sequences: int  # per batch
    length: int  # tokens per sequence
    dtype: str
    reference: str
    loss: pd.DataFrame
    gradients: pd.DataFrame
    operands: pd.DataFrame
    sums: pd.DataFrame  # without rows unless accumulators were named

    @property
    def accumulators(self) -> tuple[str, ...]:
        """The names of the accumulators whose sums were measured."""
        return tuple(dict.fromkeys(map(str, self.sums["accumulator"])))

    def summary(self) -> pd.DataFrame:
        """Return a row for each recipe: means over batches, and their standard errors (`_se`), NaN for one batch."""
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

        Each row has the measures of the weight gradient, the relative error of each operand slot, and the relative
        error of the sums of each accumulator.
        """
        keys = ["recipe", "layer"]
        labels = {"block": "first", "part": "first"}
        measures = ["norm", "cosine", "error", "bias", "noise", "systematic"]
        gradients = self.gradients.groupby(keys, sort=False).agg({**labels, **dict.fromkeys(measures, "mean")})
        errors = self.operands.groupby([*keys, "slot"], sort=False)["error"].mean().unstack("slot")
        sums = self.sums.groupby([*keys, "accumulator"], sort=False)["error"].mean().unstack("accumulator")
        return gradients.join(errors).join(sums.add_prefix(SUMS)).reset_index()

    def long(self) -> pd.DataFrame:
        """Return all tables as one, with a row for each number: `measure` is its name, `value` the number."""
        parts = []
        for frame in (self.loss, self.gradients, self.operands, self.sums):
            melted = frame.melt([key for key in KEYS if key in frame], var_name="measure", value_name="value")
            melted["value"] = melted["value"].astype(float)
            absent = melted["measure"].str.startswith(("share_", "bits")) & melted["value"].isna()
            parts.append(melted[~absent].reindex(columns=[*KEYS, "measure", "value"]))
        return pd.concat(parts, ignore_index=True).astype(dict.fromkeys(("batch", "seed", "block"), "Int64"))
