"""Numbers of NVFP4's trials that claims compare: the gap to BF16 around the decay, and where gradients err."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import pandas as pd

from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.hooks import metric

LOSS = "validation_loss"
ARM, TRUNK = "nvfp4-trunk", "trunk"
LAST_PART = 5  # the last fifth of the blocks: as many as four are of the paper's twenty
ERROR = "gradient_error"


@metric("nvfp4", "last_gradient_errors")
def last_gradient_errors(results: Results) -> Mapping[str, float]:
    """Return how far the last fifth of the blocks lies above the others: relative errors of weight gradients."""
    numerics = results.numerics()
    if numerics.empty or ERROR not in numerics:
        return {}
    rows = numerics.dropna(subset=[ERROR]).drop_duplicates(["id", "step", "block", "part", "layer"])
    rows = rows[rows["step"] == rows.groupby("id")["step"].transform("max")]
    found = {}
    for trial, errors in rows.groupby(["id", "block"])[ERROR].mean().groupby(level="id"):
        values = errors.droplevel("id").sort_index().tolist()
        last = max(1, round(len(values) / LAST_PART))
        if len(values) > last:
            found[str(trial)] = fmean(values[-last:]) - fmean(values[:-last])
    return found


@metric("nvfp4", "loss_before_decay")
def loss_before_decay(results: Results) -> Mapping[str, float]:
    """Return the last loss of the runs that leave BF16 before the decay, and the trunk's loss after as many tokens."""
    curves = results.curves(LOSS).drop_duplicates(["id", "tokens"])
    ours = curves[curves["arm"] == ARM]
    ends = ours[ours["step"] == ours.groupby("id")["step"].transform("max")]
    trunks = curves[curves["arm"] == TRUNK].merge(ends[["seed", "tokens"]], on=["seed", "tokens"])
    rows = pd.concat([ends, trunks])
    return {str(trial): float(value) for trial, value in zip(rows["id"], rows["value"], strict=True)}
