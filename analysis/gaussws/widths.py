"""Bit widths: where each layer's end, how they come there, and how many parameters need how many (G15 and its control).

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

from fewbits.analysis.arms import decided, ids, own
from fewbits.analysis.engine.data import Data, Differences, NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.gaussws.arms import FAMILIES, OURS, chosen
from fewbits.analysis.registry import claim, control
from fewbits.analysis.results import NotRun
from fewbits.analysis.verdicts import Verdict, every, higher, not_run, noted, share_within
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.registry import on_meta
from fewbits.models.observer import TIERS
from fewbits.sweeps.running.store import State

NINE = paper("gaussws").numbers["to-nine"].value
ALL = 1.01  # no share is above all; the bound is beyond it, so that all of them lie within
OURS_LOW = "gaussws-low"
LEAST = 0.1  # bits: a width that has moved less has learned nothing
COLUMNS = ("bits_mean", "bits_std", "bits_min", "bits_max", *(f"bits_to_{tier}" for tier in TIERS))


@dataclass(frozen=True)
class Final:
    """Of a trial at its end, all layers together."""

    mean: float
    moved: float  # root of the mean square of what widths are away from where they began
    tiers: dict[int, float]  # share of parameters up to so many bits


def recorded(results: Results) -> pd.DataFrame:
    """Each window's widths by layer, in the model's order, with a layer's number of parameters; empty of no sampler."""
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
    """Last windows of trials that are done: where others stopped is not their end."""
    done = rows[rows["state"] == State.DONE]
    return done[done["step"] == done.groupby("id")["step"].transform("max")]


def finals(results: Results) -> dict[str, Final]:
    """By trial that is done, of its last window."""
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
    """Where weight decay takes the widths, were there no gradients."""
    optimizer, steps = trial.optimizer, trial.training.steps
    decay = optimizer.weight_decay if optimizer.bits_weight_decay is None else optimizer.bits_weight_decay
    rate = optimizer.lr * optimizer.bits_lr_ratio
    left = math.prod(1 - rate * factor(trial.schedule, step, steps) * decay for step in range(steps))
    sampler = trial.recipe.sampler
    return sampler.target + (sampler.init - sampler.target) * left


def families(results: Results) -> dict[str, Results]:
    """Of those that this scale runs, each with its sampled arm."""
    found = {name: chosen(results, sweep) for name, sweep in FAMILIES.items()}
    return {name: part for name, part in found.items() if isinstance(part, Results) and part.has(OURS)}


# -------------------------------------------------------------------------------- the control, and G15


@control("gaussws", "bits-moved", f"GaussWS's bit widths end more than {LEAST:g} bits from where they began")
def bits_moved(results: Results) -> Verdict:
    parts = {}
    for name, part in families(results).items():
        moved = {key: one.moved for key, one in finals(part).items()}
        for arm in filter(part.has, (OURS, OURS_LOW)):
            of = name if arm == OURS else f"{name}, low rate"
            parts[of] = decided(own(part, moved, arm), lambda found: higher(found, LEAST))
    return every(parts) if parts else not_run(results.scale_name)


@claim("gaussws", "G15")
def g15(results: Results) -> Verdict:
    there = families(results)
    if not there:
        return not_run(results.scale_name)
    parts = {}
    for name, part in there.items():
        shares = {key: one.tiers[9] for key, one in finals(part).items()}
        parts[f"{name}: at 9 bits or fewer"] = decided(
            own(part, shares, OURS), lambda found: share_within(found, NINE, ALL)
        )
    if len(there) == len(FAMILIES):
        parts["GPT-2's mean width above Llama 2's"] = higher(wider(there))
    return noted(every(parts), *_drawn(there), *_missing(there))


def wider(there: dict[str, Results]) -> Data:
    """GPT-2's mean width less Llama 2's, seed by seed."""
    found: dict[str, dict[int, float]] = {}
    trials: list[str] = []
    for name, part in there.items():
        ended, by_seed = finals(part), ids(part, OURS)
        found[name] = {seed: ended[key].mean for seed, key in by_seed.items() if key in ended}
        trials += by_seed.values()
    (ours, theirs), seeds = found.values(), [*next(iter(found.values()))]
    values = tuple(ours[seed] - theirs[seed] for seed in seeds if seed in theirs)
    return Differences(values, False, tuple(trials)) if values else NoData("no widths of both families", tuple(trials))


def _drawn(there: dict[str, Results]) -> tuple[str, ...]:
    """What decay alone would have done."""
    words = []
    for name, part in there.items():
        ended = finals(part)
        for key in list(ids(part, OURS).values())[:1]:
            alone = by_decay_alone(part.plan.trials[key].trial)
            mean = f", here {ended[key].mean:.2f}" if key in ended else ""
            words.append(f"{name}: weight decay alone would take widths to {alone:.2f} bits{mean}")
    return (*words, "widths' own rate and decay are not in the paper and assumed") if words else ()


def _missing(there: dict[str, Results]) -> tuple[str, ...]:
    left = [name for name in FAMILIES if name not in there]
    return (f"{', '.join(left)}: not run at this scale, not judged",) if left else ()


def final_of(results: Results, arm: str) -> Final | NotRun | None:
    """Means over an arm's seeds; None where none has ended."""
    ended = finals(results)
    found = [ended[key] for key in ids(results, arm).values() if key in ended]
    if not found:
        return None if results.has(arm) else NotRun(results.scale_name)
    count = len(found)
    return Final(
        sum(one.mean for one in found) / count,
        sum(one.moved for one in found) / count,
        {tier: sum(one.tiers[tier] for one in found) / count for tier in TIERS},
    )
