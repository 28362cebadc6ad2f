"""Numbers of GaussWS's trials that claims compare: what became of bit widths."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import pandas as pd
from torch import nn

from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.hooks import metric
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.registry import on_meta

LOSS = "validation_loss"
SHARE = (0.0, 1.0)


@metric("gaussws", "width_spread")
def width_spread(results: Results) -> Mapping[str, float]:
    """Return how far widths spread within a trial at its end, in bits, over all squares of all layers.

    All widths begin alike and decay alike, so that decay alone, which moves them by almost two bits, leaves this at 0.
    """
    found = {}
    for trial, rows in _last(results):
        mean = float(np.average(rows["bits_mean"], weights=rows["size"]))
        variance = np.average(rows["bits_std"] ** 2 + (rows["bits_mean"] - mean) ** 2, weights=rows["size"])
        found[trial] = float(np.sqrt(variance))
    return found


@metric("gaussws", "to_nine_bits", SHARE)
def to_nine_bits(results: Results) -> Mapping[str, float]:
    return {trial: float(np.average(rows["bits_to_9"], weights=rows["size"])) for trial, rows in _last(results)}


@metric("gaussws", "mean_width")
def mean_width(results: Results) -> Mapping[str, float]:
    return {trial: float(np.average(rows["bits_mean"], weights=rows["size"])) for trial, rows in _last(results)}


def _last(results: Results) -> list[tuple[str, pd.DataFrame]]:
    """Return each trial's widths by layer in its last window, with the layers' sizes."""
    numerics = results.numerics()
    if numerics.empty or "bits_mean" not in numerics:
        return []
    rows = numerics.dropna(subset=["bits_mean"]).drop_duplicates(["id", "step", "layer"])
    rows = rows[rows["step"] == rows.groupby("id")["step"].transform("max")]
    sizes = [
        _sizes(results.plan.trials[str(trial)].trial.model).get(str(layer), 0)
        for trial, layer in zip(rows["id"], rows["layer"], strict=True)
    ]
    return [(str(trial), seen) for trial, seen in rows.assign(size=sizes).groupby("id")]


@cache
def _sizes(config: DecoderConfig) -> dict[str, int]:
    return {
        name: module.weight.numel() for name, module in on_meta(config).named_modules() if isinstance(module, nn.Linear)
    }
