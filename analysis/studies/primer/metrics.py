"""Metrics of the primer's trials: shares of updates that are lost, and of gradients that are 0.

Counts of precision.parquet are added over all measured updates of a trial. Rows with the slot `dy` count gradients of
linear layers' results, rows with the slot `parameter` updates of weights (update_records.py defines lost updates).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from fewbits.analysis.engine.claims.hooks import metric
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.theme import Array
from fewbits.experiments.optimization.update_records import LOWEST

SHARE = (0.0, 1.0)
SMALLEST = -24  # the exponent of FP16's smallest number

Numbers = Mapping[str, float]


def _counts(results: Results, slot: str) -> dict[str, pd.DataFrame]:
    """Return {trial id: rows of precision.parquet with this slot}."""
    rows = results.table_of("precision.parquet")
    if rows.empty:
        return {}
    rows = rows[rows["slot"] == slot].drop_duplicates(["id", "step", "layer"])
    return {str(trial): group for trial, group in rows.groupby("id")}


@metric("primer", "lost_updates", SHARE)
def lost_updates(results: Results) -> Numbers:
    """Return the share of nonzero updates that left the trial's stored weight unchanged."""
    sums = {trial: rows[["lost", "updates"]].sum() for trial, rows in _counts(results, "parameter").items()}
    return {trial: float(s["lost"] / s["updates"]) for trial, s in sums.items() if s["updates"]}


@metric("primer", "zero_gradients", SHARE)
def zero_gradients(results: Results) -> Numbers:
    """Return the share of zeros among the gradients of linear layers' results."""
    return {trial: zeros for trial, (_, zeros) in exponents(results).items()}


@metric("primer", "below_fp16", SHARE)
def below_fp16(results: Results) -> Numbers:
    """Return the share of these gradients that are 0 or, unscaled, smaller than FP16's smallest number."""
    return {t: float(shares[: SMALLEST - LOWEST].sum()) + zeros for t, (shares, zeros) in exponents(results).items()}


def exponents(results: Results) -> dict[str, tuple[Array, float]]:
    """Return {trial id: (shares by exponent, share of zeros)} of the gradients of linear layers' results.

    Element i of the first is the share with the exponent LOWEST + i; the first and the last include all beyond.
    """
    shares = {}
    for trial, rows in _counts(results, "dy").items():
        total = float(rows["values"].sum())
        shares[trial] = np.stack([*rows["histogram"]]).sum(0) / total, float(rows["zeros"].sum()) / total
    return shares


@metric("primer", "flushed_beyond_activations", (-1.0, 1.0))
def flushed_beyond_activations(results: Results) -> Numbers:
    """Return the share of gradients (dgrad.dy) that casts turn into 0, minus that of activations (fprop.x)."""
    rows = results.numerics()
    if "flushed" not in rows:  # no trial with casts has written statistics yet
        return {}
    shares = rows.groupby(["slot", "id"])["flushed"].mean()
    gap = (shares["dgrad.dy"] - shares["fprop.x"]).dropna()
    return {str(trial): float(share) for trial, share in gap.items()}
