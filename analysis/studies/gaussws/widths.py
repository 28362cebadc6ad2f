"""Bit widths: where each layer's end, how they develop, and how many parameters need how many bits.

Each 32x32 square has a width; the observer keeps mean, spread, extremes and the shares up to 5, 9 and 12 bits of every
layer. Layers count by their parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pandas as pd
from torch import nn

from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.places import sweep_places, trial_ids
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.registry import on_meta
from fewbits.models.observer import TIERS
from fewbits.sweeps.running.store import State

OURS = "gaussws"
FAMILIES = {"GPT-2": "gpt2", "Llama 2": "llama2"}  # with their sweeps
COLUMNS = ("bits_mean", "bits_std", "bits_min", "bits_max", *(f"bits_to_{tier}" for tier in TIERS))


@dataclass(frozen=True)
class Final:
    """The widths of a trial at its end, all layers together."""

    mean: float
    moved: float  # root of the mean square of their distances from where they began
    tiers: dict[int, float]  # share of parameters up to so many bits


def recorded(results: Results) -> pd.DataFrame:
    """Return each window's widths by layer, in the model's order, with a layer's number of parameters."""
    return results.remembered("bit widths", lambda: _recorded(results))


def _recorded(results: Results) -> pd.DataFrame:
    frame = results.numerics()
    if frame.empty or "bits_mean" not in frame:
        return pd.DataFrame(columns=["id", "arm", "seed", "state", "step", "place", "part", "block", "size", *COLUMNS])
    frame = frame[frame["bits_mean"].notna()].drop_duplicates(["id", "step", "layer"])
    sizes = [_sizes(results.plan.trials[str(key)].trial.model).get(str(layer), 0) for key, layer in _keys(frame)]
    places = [_order(results.plan.trials[str(key)].trial.model).get(str(layer), 0) for key, layer in _keys(frame)]
    return frame.assign(size=sizes, place=places).sort_values(["id", "step", "place"])


def _keys(frame: pd.DataFrame) -> list[tuple[Any, Any]]:
    return list(zip(frame["id"], frame["layer"], strict=True))


@cache
def _sizes(config: DecoderConfig) -> dict[str, int]:
    return {name: module.weight.numel() for name, module in on_meta(config).named_modules() if _linear(module, name)}


def _linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name.startswith("blocks.")


@cache
def _order(config: DecoderConfig) -> dict[str, int]:
    return {name: place for place, name in enumerate(_sizes(config))}


def at_the_end(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the last windows of trials that are done: where others stopped is not their end."""
    done = rows[rows["state"] == State.DONE]
    return done[done["step"] == done.groupby("id")["step"].transform("max")]


def finals(results: Results) -> dict[str, Final]:
    """Return the widths at the end of each trial that is done."""
    found = {}
    for key, last in at_the_end(recorded(results)).groupby("id"):
        weights = last["size"] / last["size"].sum()
        begun = results.plan.trials[str(key)].trial.recipe.sampler.init
        away = last["bits_std"] ** 2 + (last["bits_mean"] - begun) ** 2
        found[str(key)] = Final(
            float((weights * last["bits_mean"]).sum()),
            math.sqrt(float((weights * away).sum())),
            {tier: float((weights * last[f"bits_to_{tier}"]).sum()) for tier in TIERS},
        )
    return found


def by_decay_alone(trial: Trial) -> float:
    """Return where weight decay takes the widths, were there no gradients."""
    optimizer, steps = trial.optimizer, trial.training.steps
    decay = optimizer.weight_decay if optimizer.bits_weight_decay is None else optimizer.bits_weight_decay
    rate = optimizer.lr * optimizer.bits_lr_ratio
    left = math.prod(1 - rate * factor(trial.schedule, step, steps) * decay for step in range(steps))
    sampler = trial.recipe.sampler
    return sampler.target + (sampler.init - sampler.target) * left


def families(results: Results) -> dict[str, Results]:
    """Return the families that this scale runs, each with its sampled arm."""
    found = {name: sweep_places(results, sweep) for name, sweep in FAMILIES.items()}
    return {name: part for name, part in found.items() if isinstance(part, Results) and part.has(OURS)}


def final_of(results: Results, arm: str) -> Final | None:
    """Return means over an arm's seeds; None where none has ended."""
    ended = finals(results)
    found = [ended[key] for key in trial_ids(results, arm).values() if key in ended]
    if not found:
        return None
    count = len(found)
    return Final(
        sum(one.mean for one in found) / count,
        sum(one.moved for one in found) / count,
        {tier: sum(one.tiers[tier] for one in found) / count for tier in TIERS},
    )
