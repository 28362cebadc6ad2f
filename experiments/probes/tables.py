"""What a probe found: its three tables, and views of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

WHOLE = "whole"  # in the place of a layer: all parameters of the model
KEYS = ["recipe", "batch", "seed", "layer", "block", "part", "slot", "quantizer"]  # what a row may be of


@dataclass(frozen=True, eq=False)
class Probe:
    """What a probe found, and what it looked at."""

    run: str  # the run folder's name
    step: int
    split: str
    batches: int
    sequences: int  # to a batch
    length: int  # tokens to a sequence
    dtype: str
    reference: str
    loss: pd.DataFrame
    gradients: pd.DataFrame
    operands: pd.DataFrame

    def summary(self) -> pd.DataFrame:
        """A row for each recipe: means over batches; `_se` is the standard error of such a mean, NaN of one batch."""
        rows = []
        for recipe, losses in self.loss.groupby("recipe", sort=False):
            increase = losses.groupby("batch")["increase"].mean()
            gradients = self.gradients[self.gradients["recipe"] == recipe]
            whole = gradients[gradients["layer"] == WHOLE]
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
                }
            )
        return pd.DataFrame(rows)

    def layers(self) -> pd.DataFrame:
        """A row for each recipe and layer: means over batches and seeds, each slot's relative error beside them."""
        keys = ["recipe", "layer"]
        labels = {"block": "first", "part": "first"}
        measures = ["norm", "cosine", "error", "bias", "noise", "systematic"]
        gradients = self.gradients.groupby(keys, sort=False).agg({**labels, **dict.fromkeys(measures, "mean")})
        errors = self.operands.groupby([*keys, "slot"], sort=False)["error"].mean().unstack("slot")
        return gradients.join(errors).reset_index()

    def long(self) -> pd.DataFrame:
        """All three tables in one, a row for each number: what it is in `measure`, the number in `value`."""
        parts = []
        for frame in (self.loss, self.gradients, self.operands):
            melted = frame.melt([key for key in KEYS if key in frame], var_name="measure", value_name="value")
            melted["value"] = melted["value"].astype(float)
            absent = melted["measure"].str.startswith(("share_", "bits")) & melted["value"].isna()
            parts.append(melted[~absent].reindex(columns=[*KEYS, "measure", "value"]))
        return pd.concat(parts, ignore_index=True).astype(dict.fromkeys(("batch", "seed", "block"), "Int64"))
