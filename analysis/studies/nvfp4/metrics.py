"""Metrics of NVFP4's trials that claims compare: losses before the decay, and errors of gradients by block."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import pandas as pd

from fewbits.analysis.engine.claims.hooks import metric
from fewbits.analysis.engine.results.frames import Results, last_windows

LOSS = "validation_loss"
ARM, TRUNK = "nvfp4-trunk", "trunk"
LAST_PART = 5  # the last fifth of the blocks, as four of the paper's twenty
ERROR = "gradient_error"


@metric("nvfp4", "last_gradient_errors")
def last_gradient_errors(results: Results) -> Mapping[str, float]:
    """Return the mean relative error of weight gradients in the last fifth of the blocks minus that in the others."""
    found = {}
    for trial, blocks in errors_by_block(results).items():
        values = [blocks[block] for block in sorted(blocks)]
        last = max(1, round(len(values) / LAST_PART))
        if len(values) > last:
            found[trial] = fmean(values[-last:]) - fmean(values[:-last])
    return found


@metric("nvfp4", "mean_gradient_error")
def mean_gradient_error(results: Results) -> Mapping[str, float]:
    """Return the mean relative error of each trial's weight gradients over all blocks."""
    return {trial: fmean(blocks.values()) for trial, blocks in errors_by_block(results).items()}


def gradient_errors(results: Results) -> pd.DataFrame:
    """Return a row for each linear layer in the last window of each trial in which gradients were measured.

    The error is the norm of the difference between the gradients with and without quantization of this layer's
    operands, relative to the norm of the gradient. The paper describes it as the error of Wgrad's output that comes
    from quantizing its inputs. Blocks are counted from 1.
    """
    numerics, columns = results.numerics(), ["id", "block", "part", ERROR]
    if numerics.empty or ERROR not in numerics:
        return pd.DataFrame(columns=columns)
    rows = numerics.dropna(subset=[ERROR]).drop_duplicates(["id", "step", "block", "part", "layer"])
    return last_windows(rows).assign(block=lambda last: last["block"] + 1)[columns]


def errors_by_block(results: Results, part: str | None = None) -> dict[str, dict[int, float]]:
    """Return each trial's errors by block, as means over the block's linear layers. part: only layers of this part."""
    rows = results.remembered("gradient errors", lambda: gradient_errors(results))
    means = (rows if part is None else rows[rows["part"] == part]).groupby(["id", "block"])[ERROR].mean().reset_index()
    return {
        str(trial): dict(zip(of["block"].astype(int), of[ERROR].astype(float), strict=True))
        for trial, of in means.groupby("id")
    }


@metric("nvfp4", "loss_before_decay")
def loss_before_decay(results: Results) -> Mapping[str, float]:
    """Return the last loss of runs that leave BF16 before the decay, and the trunk's loss after as many tokens."""
    curves = results.curves(LOSS).drop_duplicates(["id", "tokens"])
    ends = last_windows(curves[curves["arm"] == ARM])
    trunks = curves[curves["arm"] == TRUNK].merge(ends[["seed", "tokens"]], on=["seed", "tokens"])
    rows = pd.concat([ends, trunks])
    return {str(trial): float(value) for trial, value in zip(rows["id"], rows["value"], strict=True)}
