"""Numbers of GaussWS's trials that claims compare: bit widths, and how two optimizers change what sampling costs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import pandas as pd
from torch import nn

from fewbits.analysis.engine.data import Measured
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.hooks import measure, metric
from fewbits.analysis.engine.pairing import combined
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


@metric("gaussws", "cast_cost")
def cast_cost(results: Results) -> Mapping[str, float]:
    """Return how far the validation loss rises when weights are cast to the formats of their widths, by trial."""
    cast, uncast = f"{LOSS}_cast", f"{LOSS}_unquantized"
    if not {cast, uncast} <= set(results.trials):
        return {}
    done = results.trials.dropna(subset=[cast, uncast])
    return {str(i): float(v) for i, v in zip(done["id"], done[cast] / done[uncast] - 1, strict=True)}


def mean_widths(results: Results) -> dict[str, float]:
    return {trial: float(np.average(rows["bits_mean"], weights=rows["size"])) for trial, rows in _last(results)}


@measure("gaussws", "G12")
def optimizers(results: Results) -> Mapping[str, Measured]:
    """Return, seed by seed, the interaction of sampling and optimizer: what GaussWS costs under Adam-mini over what it
    costs under AdamW. All four arms start from the same weights and see the same data."""
    arms = (("gpt2-mini", "adam-mini-gaussws"), ("gpt2-mini", "adam-mini"), ("gpt2", "gaussws"), ("gpt2", "bf16"))
    return {"interaction": combined(results, arms, lambda mg, mb, g, b: (mg / mb) / (g / b) - 1, LOSS)}


@measure("gaussws", "G20")
def adam_mini(results: Results) -> Mapping[str, Measured]:
    """Return, seed by seed, what Adam-mini costs beside AdamW under GaussWS over what it costs under BF16."""
    arms = (
        ("llama2-mini", "adam-mini-gaussws"),
        ("llama2", "gaussws"),
        ("llama2-mini", "adam-mini"),
        ("llama2", "bf16"),
    )
    return {"adam-mini": combined(results, arms, lambda mg, g, mb, b: (mg / g) / (mb / b) - 1, LOSS)}


@measure("gaussws", "G15")
def families(results: Results) -> Mapping[str, Measured]:
    """Return how much wider GPT-2's widths end than Llama 2's, both without a penalty, seed by seed."""
    arms = (("widths", "lambda-0"), ("llama2", "gaussws"))
    found = combined(results, arms, lambda gpt2, llama2: gpt2 - llama2, mean_widths(results), relative=False)
    return {"families": found}


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
