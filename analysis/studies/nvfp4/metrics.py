"""Numbers of NVFP4's trials that claims compare: the gap to BF16 around the decay, and where gradients err."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import pandas as pd

from fewbits.analysis.engine.frames import Results, last_windows
from fewbits.analysis.engine.hooks import metric

LOSS = "validation_loss"
ARM, TRUNK = "nvfp4-trunk", "trunk"
LAST_PART = 5  # the last fifth of the blocks: as many as four are of the paper's twenty
ERROR = "gradient_error"


@metric("nvfp4", "last_gradient_errors")
def last_gradient_errors(results: Results) -> Mapping[str, float]:
    """Return how far the last fifth of the blocks lies above the others: relative errors of weight gradients."""
    found = {}
    for trial, blocks in errors_by_block(results).items():
        values = [blocks[block] for block in sorted(blocks)]
        last = max(1, round(len(values) / LAST_PART))
        if len(values) > last:
            found[trial] = fmean(values[-last:]) - fmean(values[:-last])
    return found


def gradient_errors(results: Results) -> pd.DataFrame:
    """Return a row for each linear layer, of each trial's last window in which its gradients were measured.

    The error is the norm of the gradient's error over that of the gradient, with one layer's own operands quantized and
    not: Wgrad's output from its inputs being in few bits, in the paper's words. Blocks are counted from 1.
    """
    numerics, columns = results.numerics(), ["id", "block", "part", ERROR]
    if numerics.empty or ERROR not in numerics:
        return pd.DataFrame(columns=columns)
    rows = numerics.dropna(subset=[ERROR]).drop_duplicates(["id", "step", "block", "part", "layer"])
    return last_windows(rows).assign(block=lambda last: last["block"] + 1)[columns]


def errors_by_block(results: Results, part: str | None = None) -> dict[str, dict[int, float]]:
    """Return each trial's errors by block: means over its linear layers, or over one kind of them."""
    rows = results.remembered("gradient errors", lambda: gradient_errors(results))
    means = (rows if part is None else rows[rows["part"] == part]).groupby(["id", "block"])[ERROR].mean().reset_index()
    return {
        str(trial): dict(zip(of["block"].astype(int), of[ERROR].astype(float), strict=True))
        for trial, of in means.groupby("id")
    }


@metric("nvfp4", "loss_before_decay")
def loss_before_decay(results: Results) -> Mapping[str, float]:
    """Return the last loss of the runs that leave BF16 before the decay, and the trunk's loss after as many tokens."""
    curves = results.curves(LOSS).drop_duplicates(["id", "tokens"])
    ends = last_windows(curves[curves["arm"] == ARM])
    trunks = curves[curves["arm"] == TRUNK].merge(ends[["seed", "tokens"]], on=["seed", "tokens"])
    rows = pd.concat([ends, trunks])
    return {str(trial): float(value) for trial, value in zip(rows["id"], rows["value"], strict=True)}
