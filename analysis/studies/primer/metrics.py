"""Metrics of the primer's trials that claims compare: updates that are lost, gradients that are 0, errors of casts.

An update is lost if, because of rounding, it leaves the stored weight unchanged.
A metric is a mapping {trial id: number}. Counts are read from precision.parquet and added over all measured updates of
a trial. In precision.parquet, rows with the slot `dy` count gradients of linear layers' results, which FP16 training
stores in FP16, and rows with the slot `parameter` count updates of weights. Errors of casts are read from
numerics.parquet.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from fewbits.analysis.engine.claims.hooks import metric
from fewbits.analysis.engine.results.frames import Results
from fewbits.experiments.optimization.update_records import BINS, LOWEST

SHARE = (0.0, 1.0)
SMALLEST = -24  # the exponent of FP16's smallest number

Numbers = Mapping[str, float]


def counts(results: Results, slot: str) -> pd.DataFrame:
    """Return a table with a row for each trial and a column for each of a slot's counts, added over steps and layers.

    The table is empty if no trial has measured an update yet. slot: dy (gradients of linear layers' results) or
    parameter (updates of weights). A count is, for example, the number of zeros or of lost updates.
    """
    rows = results.table_of("precision.parquet")
    if rows.empty:
        return pd.DataFrame()
    rows = rows[rows["slot"] == slot].drop_duplicates(["id", "step", "layer"])
    return rows.groupby("id")[["values", "zeros", "updates", "lost", "lost_bf16", "lost_fp16"]].sum()


def _shares(results: Results, slot: str, part: str, whole: str) -> Numbers:
    """Return {trial id: ratio} of two columns of `counts(results, slot)`: column `part` divided by column `whole`.

    Trials for which `whole` is 0 are left out.
    """
    sums = counts(results, slot)
    if sums.empty:
        return {}
    sums = sums[sums[whole] > 0]
    return {str(trial): float(share) for trial, share in (sums[part] / sums[whole]).items()}


@metric("primer", "lost_updates", SHARE)
def lost_updates(results: Results) -> Numbers:
    """Return the share of nonzero updates that did not change the stored weight."""
    return _shares(results, "parameter", "lost", "updates")


@metric("primer", "lost_in_bf16", SHARE)
def lost_in_bf16(results: Results) -> Numbers:
    """Return the share of nonzero updates that would leave BF16 weights unchanged, because of rounding.

    The trial's weights may have another dtype.
    """
    return _shares(results, "parameter", "lost_bf16", "updates")


@metric("primer", "lost_in_fp16", SHARE)
def lost_in_fp16(results: Results) -> Numbers:
    """Return the share of nonzero updates that would leave FP16 weights unchanged, because of rounding.

    The trial's weights may have another dtype.
    """
    return _shares(results, "parameter", "lost_fp16", "updates")


@metric("primer", "zero_gradients", SHARE)
def zero_gradients(results: Results) -> Numbers:
    """Return by trial the share of zeros among the gradients of linear layers' results."""
    return _shares(results, "dy", "zeros", "values")


@metric("primer", "below_fp16", SHARE)
def below_fp16(results: Results) -> Numbers:
    """Return the share of the gradients of linear layers' results that are 0 or smaller than 2^-24.

    2^-24 is FP16's smallest number. Gradients are compared with it after division by the loss scale.
    """
    found = exponents(results)
    return {trial: float(shares[: SMALLEST - LOWEST].sum() + zeros) for trial, (shares, zeros) in found.items()}


def exponents(results: Results) -> dict[str, tuple[np.ndarray, float]]:
    """Return {trial id: (shares, zeros)} for the gradients of linear layers' results.

    `shares` is an array of BINS elements: element i is the share of gradients with the exponent LOWEST + i. The first
    element also includes all lower exponents, the last one all higher exponents. `zeros` is the share of gradients that
    are 0.
    """
    rows = results.table_of("precision.parquet")
    if rows.empty:
        return {}
    rows = rows[rows["slot"] == "dy"].drop_duplicates(["id", "step", "layer"])
    found = {}
    for trial, group in rows.groupby("id"):
        total = float(group["values"].sum())
        histogram = np.stack([np.asarray(counted) for counted in group["histogram"]]).sum(0)
        assert histogram.size == BINS
        found[str(trial)] = histogram / total, float(group["zeros"].sum()) / total
    return found


@metric("primer", "skipped_updates")
def skipped_updates(results: Results) -> Numbers:
    """Return the number of updates that loss scaling skipped because a gradient overflowed; 0 without loss scaling."""
    rows = results.table_of("metrics.parquet")
    if rows.empty:
        return {}
    if "skipped" not in rows:
        return {str(trial): 0.0 for trial in rows["id"].unique()}
    sums = rows.drop_duplicates(["id", "step"]).groupby("id")["skipped"].sum()
    return {str(trial): float(count) for trial, count in sums.items()}


@metric("primer", "last_loss_scale")
def last_loss_scale(results: Results) -> Numbers:
    """Return the loss scale at the last update; trials without loss scaling are left out."""
    rows = results.table_of("metrics.parquet")
    if rows.empty or "loss_scale" not in rows:
        return {}
    last = rows.dropna(subset=["loss_scale"]).sort_values("step").groupby("id")["loss_scale"].last()
    return {str(trial): float(scale) for trial, scale in last.items()}


# -------------------------------------------------------------------------------- casts to FP8


def _cast(results: Results, slot: str, column: str) -> pd.Series:
    """Return by trial the mean of a column of numerics.parquet, over the rows of one operand slot."""
    rows = results.numerics()
    if column not in rows:  # no trial with casts has written statistics yet
        return pd.Series(dtype=float)
    return rows[rows["slot"] == slot].groupby("id")[column].mean().dropna()


@metric("primer", "gradient_cast_error", SHARE)
def gradient_cast_error(results: Results) -> Numbers:
    """Return the mean relative error of the casts of gradients, in the operand slot dgrad.dy."""
    return {str(trial): float(error) for trial, error in _cast(results, "dgrad.dy", "error").items()}


@metric("primer", "flushed_gradients_beyond_activations", (-1.0, 1.0))
def flushed_gradients_beyond_activations(results: Results) -> Numbers:
    """Return (share of gradients that casts turn into 0) minus (share of activations that casts turn into 0).

    Gradients are the operands in the slot dgrad.dy, and activations those in fprop.x.
    """
    gap = _cast(results, "dgrad.dy", "flushed") - _cast(results, "fprop.x", "flushed")
    return {str(trial): float(share) for trial, share in gap.dropna().items()}
