"""Read the learned bit widths: by layer over training, and for a whole model at the end of training.

Each 32x32 square of a weight has a bit width. During training, the observer (models/observer.py) records for each layer
the mean, standard deviation and extremes of its widths, and the shares of its parameters with at most 5, 9 and 12 bits.
A number for a whole model is a mean over its layers, weighted by their numbers of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import numpy as np
import pandas as pd
from torch import nn

from fewbits.analysis.engine.results.frames import Results, last_windows
from fewbits.analysis.engine.results.places import sweep_places, trial_ids
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.registry import on_meta
from fewbits.models.observer import TIERS
from fewbits.sweeps.planning.store import State

OURS = "gaussws"
FAMILIES = {"GPT-2": "gpt2", "Llama 2": "llama2"}  # by family of models, the sweep
COLUMNS = ("bits_mean", "bits_std", "bits_min", "bits_max", *(f"bits_to_{tier}" for tier in TIERS))


@dataclass(frozen=True)
class Final:
    """The bit widths of a whole model at the end of training."""

    mean: float
    spread: float  # standard deviation over all squares of all layers
    tiers: dict[int, float]  # by number of bits in TIERS, the share of parameters whose width is at most this number


def recorded(results: Results) -> pd.DataFrame:
    """Return a table of widths with a row for each trial, window of steps and layer; it is cached.

    Rows are sorted by trial, step and position of the layer in the model (`place`); `size` is the layer's number of
    parameters, and COLUMNS are the observer's statistics.
    """
    return results.remembered("bit widths", lambda: _recorded(results))


def _recorded(results: Results) -> pd.DataFrame:
    frame = results.numerics()
    if frame.empty or "bits_mean" not in frame:
        return pd.DataFrame(columns=["id", "arm", "seed", "state", "step", "place", "part", "block", "size", *COLUMNS])
    frame = frame[frame["bits_mean"].notna()].drop_duplicates(["id", "step", "layer"])
    layers = [
        _layers(results.plan.trials[str(trial)].trial.model).get(str(layer), (0, 0))
        for trial, layer in zip(frame["id"], frame["layer"], strict=True)
    ]
    frame = frame.assign(place=[place for place, _ in layers], size=[size for _, size in layers])
    return frame.sort_values(["id", "step", "place"])


@cache
def _layers(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """Return the linear layers of all blocks by name: the position in the model, and the number of weights."""
    modules = on_meta(config).named_modules()
    linear = [(name, m) for name, m in modules if isinstance(m, nn.Linear) and name.startswith("blocks.")]
    return {name: (place, module.weight.numel()) for place, (name, module) in enumerate(linear)}


def at_the_end(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each finished trial's last window of steps, and no rows of other trials."""
    return last_windows(rows[rows["state"] == State.DONE])


def finals(results: Results) -> dict[str, Final]:
    """Return the widths of the whole model at the end of each finished trial, by its id."""
    ended = at_the_end(recorded(results)).drop_duplicates(["id", "layer"])
    return {str(trial): _final(rows) for trial, rows in ended.groupby("id")}


def _final(rows: pd.DataFrame) -> Final:
    mean = float(np.average(rows["bits_mean"], weights=rows["size"]))
    variance = np.average(rows["bits_std"] ** 2 + (rows["bits_mean"] - mean) ** 2, weights=rows["size"])
    tiers = {tier: float(np.average(rows[f"bits_to_{tier}"], weights=rows["size"])) for tier in TIERS}
    return Final(mean, float(np.sqrt(variance)), tiers)


def by_decay_alone(trial: Trial) -> float:
    """Return the final bit width that decay alone would give, if all gradients of the widths were 0."""
    optimizer, steps = trial.optimizer, trial.training.steps
    decay = optimizer.weight_decay if optimizer.bits_weight_decay is None else optimizer.bits_weight_decay
    rate = optimizer.lr * optimizer.bits_lr_ratio
    left = math.prod(1 - rate * factor(trial.schedule, step, steps) * decay for step in range(steps))
    sampler = trial.recipe.sampler
    return sampler.target + (sampler.init - sampler.target) * left


def families(results: Results) -> dict[str, Results]:
    """Return the results of each model family's sweep, by the family's name (GPT-2, Llama 2).

    Families whose arm `gaussws` is not run at this scale are left out.
    """
    found = {name: sweep_places(results, sweep) for name, sweep in FAMILIES.items()}
    return {name: part for name, part in found.items() if isinstance(part, Results) and part.has(OURS)}


def final_of(results: Results, arm: str) -> Final | None:
    """Return an arm's final widths, averaged over seeds; None if no trial of the arm is finished."""
    ended = finals(results)
    of_arm = [ended[key] for key in trial_ids(results, arm).values() if key in ended]
    if not of_arm:
        return None
    tiers = {tier: fmean(one.tiers[tier] for one in of_arm) for tier in TIERS}
    return Final(fmean(one.mean for one in of_arm), fmean(one.spread for one in of_arm), tiers)
