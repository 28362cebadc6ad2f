"""Metrics of NVFP4's trials that claims compare: losses before the learning rate decays, and errors of gradients.

A metric is a number for each trial, by its id.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import pandas as pd

from fewbits.analysis.engine.claims.hooks import metric
from fewbits.analysis.engine.results.frames import Results, last_windows

LOSS = "validation_loss"
ARM, TRUNK = "nvfp4-trunk", "trunk"  # the trunk in NVFP4, and the trunk in BF16 from which it branches
LAST_PART = 5  # the last 1/5 of the blocks, like the paper's last 4 of 20 blocks
ERROR = "gradient_error"


@metric("nvfp4", "last_gradient_errors")
def last_gradient_errors(results: Results) -> Mapping[str, float]:
    """Return, by trial, (mean error of weight gradients in the model's last fifth of blocks) − (mean in other blocks).

    Errors are relative, as `gradient_errors` defines them.
    """
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
    """Return a table of errors of weight gradients: id, block (from 1), part (such as qkv), gradient_error.

    The table has a row for each linear layer and trial, from the trial's last window of steps with measured gradients.
    The error is ‖g_q − g‖ / ‖g‖, where g is a layer's weight gradient, and g_q the gradient with quantized operands.
    The NVFP4 paper describes it as the error of Wgrad's output that comes from quantizing Wgrad's inputs.
    """
    numerics, columns = results.numerics(), ["id", "block", "part", ERROR]
    if numerics.empty or ERROR not in numerics:
        return pd.DataFrame(columns=columns)
    rows = numerics.dropna(subset=[ERROR]).drop_duplicates(["id", "step", "block", "part", "layer"])
    return last_windows(rows).assign(block=lambda last: last["block"] + 1)[columns]


def errors_by_block(results: Results, part: str | None = None) -> dict[str, dict[int, float]]:
    """Return {trial id: {number of a block, from 1: mean error of the weight gradients of its linear layers}}.

    part: if given, average over only the layers of this part of a block, for example qkv.
    """
    rows = results.remembered("gradient errors", lambda: gradient_errors(results))
    means = (rows if part is None else rows[rows["part"] == part]).groupby(["id", "block"])[ERROR].mean().reset_index()
    return {
        str(trial): dict(zip(of["block"].astype(int), of[ERROR].astype(float), strict=True))
        for trial, of in means.groupby("id")
    }


@metric("nvfp4", "loss_before_decay")
def loss_before_decay(results: Results) -> Mapping[str, float]:
    """Return the validation losses of the trunks before the learning rate decays, by trial.

    The loss of an NVFP4 trunk is its last one. The loss of a BF16 trunk is the one at the number of tokens at which the
    NVFP4 trunk of the same seed ends.
    """
    curves = results.curves(LOSS).drop_duplicates(["id", "tokens"])
    ends = last_windows(curves[curves["arm"] == ARM])
    trunks = curves[curves["arm"] == TRUNK].merge(ends[["seed", "tokens"]], on=["seed", "tokens"])
    rows = pd.concat([ends, trunks])
    return {str(trial): float(value) for trial, value in zip(rows["id"], rows["value"], strict=True)}
