"""Metrics of the primer's trials that claims compare: updates that are lost, gradients that are 0, errors of casts.

Counts are those of precision.parquet, over all measured updates of a trial: `dy` are gradients of the results of linear
layers, which FP16 stores, and parameters' gradients are sums in FP32. Errors of casts are those of numerics.parquet.
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
    """Return the sums of a slot's counts by trial; there are none before a trial has measured an update."""
    rows = results.table_of("precision.parquet")
    if rows.empty:
        return pd.DataFrame()
    rows = rows[rows["slot"] == slot].drop_duplicates(["id", "step", "layer"])
    return rows.groupby("id")[["values", "zeros", "updates", "lost", "lost_bf16", "lost_fp16"]].sum()


def _shares(results: Results, slot: str, part: str, whole: str) -> Numbers:
    sums = counts(results, slot)
    if sums.empty:
        return {}
    sums = sums[sums[whole] > 0]
    return {str(trial): float(share) for trial, share in (sums[part] / sums[whole]).items()}


@metric("primer", "lost_updates", SHARE)
def lost_updates(results: Results) -> Numbers:
    """Return the share of updates other than 0 that left the stored weight where it was."""
    return _shares(results, "parameter", "lost", "updates")


@metric("primer", "lost_in_bf16", SHARE)
def lost_in_bf16(results: Results) -> Numbers:
    """Return the share of updates below half a step of BF16 at their weight, however the weight is stored."""
    return _shares(results, "parameter", "lost_bf16", "updates")


@metric("primer", "lost_in_fp16", SHARE)
def lost_in_fp16(results: Results) -> Numbers:
    return _shares(results, "parameter", "lost_fp16", "updates")


@metric("primer", "zero_gradients", SHARE)
def zero_gradients(results: Results) -> Numbers:
    """Return the share of the gradients of linear layers' results that are 0."""
    return _shares(results, "dy", "zeros", "values")


@metric("primer", "below_fp16", SHARE)
def below_fp16(results: Results) -> Numbers:
    """Return the share of these gradients that are 0 or below FP16's smallest number, 2^-24, without a loss scale."""
    found = exponents(results)
    return {trial: float(shares[: SMALLEST - LOWEST].sum() + zeros) for trial, (shares, zeros) in found.items()}


def exponents(results: Results) -> dict[str, tuple[np.ndarray, float]]:
    """Return for each trial the shares of the gradients dy by exponent, from LOWEST on, and the share of zeros."""
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
    """Return how many updates overflowed; without loss scaling no update is skipped."""
    rows = results.table_of("metrics.parquet")
    if rows.empty:
        return {}
    if "skipped" not in rows:
        return {str(trial): 0.0 for trial in rows["id"].unique()}
    sums = rows.drop_duplicates(["id", "step"]).groupby("id")["skipped"].sum()
    return {str(trial): float(count) for trial, count in sums.items()}


@metric("primer", "last_loss_scale")
def last_loss_scale(results: Results) -> Numbers:
    """Return the loss scale of the last update of each trial that has one."""
    rows = results.table_of("metrics.parquet")
    if rows.empty or "loss_scale" not in rows:
        return {}
    last = rows.dropna(subset=["loss_scale"]).sort_values("step").groupby("id")["loss_scale"].last()
    return {str(trial): float(scale) for trial, scale in last.items()}


# -------------------------------------------------------------------------------- casts to FP8


def _cast(results: Results, slot: str, column: str) -> pd.Series:
    rows = results.numerics()
    if column not in rows:  # no arm with casts has finished
        return pd.Series(dtype=float)
    return rows[rows["slot"] == slot].groupby("id")[column].mean().dropna()


@metric("primer", "gradient_cast_error", SHARE)
def gradient_cast_error(results: Results) -> Numbers:
    """Return the mean relative error of the gradients' casts."""
    return {str(trial): float(error) for trial, error in _cast(results, "dgrad.dy", "error").items()}


@metric("primer", "flushed_gradients_beyond_activations", (-1.0, 1.0))
def flushed_gradients_beyond_activations(results: Results) -> Numbers:
    """Return how much larger the share of gradients that become 0 in a cast is than that of activations."""
    gap = _cast(results, "dgrad.dy", "flushed") - _cast(results, "fprop.x", "flushed")
    return {str(trial): float(share) for trial, share in gap.dropna().items()}
