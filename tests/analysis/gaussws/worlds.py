"""Simulated results of GaussWS's sweeps: a World that also has bit widths, losses with cast weights, and timings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from fewbits.experiments.evaluation.loss import WIDTHS
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.registry import on_meta
from fewbits.models.observer import TIERS
from fewbits.sweeps.planning.plan import Member, Plan
from tests.analysis import worlds
from tests.analysis.worlds import results, size, wave

__all__ = ["PAPER", "World", "benches", "forget_benches", "results"]

OPTIMIZERS, RECIPES = ("adamw", "adam-mini"), ("bf16", "gaussws", "diffq")
TURNS = 5


@dataclass
class World(worlds.World):
    bits: Mapping[str, float] = field(default_factory=dict)  # sweep → mean bit width at the end; default 5
    spread: Mapping[str, float] = field(default_factory=dict)  # sweep → standard deviation in a layer; default 0.2
    to_nine: float = 1.0  # the share of parameters with at most nine bits
    wobble: float = 1e-3  # the size of the noise over seeds of bit widths, and of `to_nine` if it is below 1
    cast: float = 0.001  # relative increase of the loss if weights are cast to their learned formats
    doses: tuple[float, float, float] = (0.05, 0.01, 0.002)  # the same for casts to three, four and five bits

    def numerics(self, of: Plan, member: Member) -> list[dict[str, Any]]:
        """Return the bit widths of each layer at half of the steps and at the end; [] for arms without a sampler."""
        trial, cell = of.trials[member.id].trial, member.cell
        sampler = trial.recipe.sampler
        if sampler.kind == "none":
            return []
        end = self.bits.get(cell.sweep, 5.0)
        chance = self.wobble * wave(str(cell.arm), cell.seed) * size(str(cell.arm))
        to_nine = min(1.0, self.to_nine + chance) if self.to_nine < 1 else 1.0
        rows = []
        for part, step in ((0.5, trial.training.steps // 2 - 1), (1.0, trial.training.steps - 1)):
            mean = sampler.init + part * (end - sampler.init) + chance
            widths = {"bits_mean": mean, "bits_std": self.spread.get(cell.sweep, 0.2)}
            widths |= {"bits_min": mean - 1, "bits_max": mean + 1}
            widths |= {f"bits_to_{tier}": to_nine if tier == 9 else 1.0 for tier in TIERS}
            rows += [{"step": step, "slot": "weight", **layer, **widths} for layer in _layers(trial.model)]
        return rows

    def further(self, of: Plan, member: Member, unquantized: float) -> dict[str, float]:
        """Return the losses with weights cast to their learned formats and to 3, 4 and 5 bits; {} without a sampler."""
        if of.trials[member.id].trial.recipe.sampler.kind == "none":
            return {}
        chance = 1 + 0.01 * (member.cell.seed % 3)
        rises = {"cast": self.cast} | {f"cast{width}": rise for width, rise in zip(WIDTHS, self.doses, strict=True)}
        return {f"validation_loss_{name}": unquantized * (1 + rise * chance) for name, rise in rises.items()}


PAPER = World(
    effect={"gpt2/gaussws": 0.001, "gpt2/diffq": 0.01, "gaussws-low": 0.001, "diffq-low": 0.01}
    | {"gpt2-mini/adam-mini": 0.01, "gpt2-mini/adam-mini-gaussws": 0.0112, "gpt2-mini/adam-mini-diffq": 0.009}
    | {"parts/all": 0.008}
    | {"llama2/bf16": 0.004, "llama2/diffq": 0.002, "llama2/gaussws": 0.0}
    | {"llama2-mini/adam-mini": 0.02, "llama2-mini/adam-mini-gaussws": 0.004},
    bits={"gpt2": 6.5, "widths": 6.5, "llama2": 5.0},
)


@cache
def _layers(model: DecoderConfig) -> list[dict[str, Any]]:
    modules = on_meta(model).named_modules()
    names = [name for name, module in modules if isinstance(module, nn.Linear) and name.startswith("blocks.")]
    return [{"layer": name, "block": int(name.split(".")[1]), "part": _part(name.split(".")[-1])} for name in names]


def _part(name: str) -> str:
    return "qkv" if name in "qkv" else name.replace("gate", "up")


# -------------------------------------------------------------------------------- benches


def benches(
    plan: Plan,
    *,
    kind: str = "cpu",
    ours: float = 1.05,
    diffq: float = 1.2,
    models: tuple[str, ...] = ("gpt2-nano",),
    box_muller: float = 4.0,
    torch: float = 12.0,
    others: float = 0.0,
) -> None:
    """Write simulated timings of training steps and of noise generators to the plan's store.

    For each of `models`, a training step takes 1 s with plain BF16, `ours` s with GaussWS and `diffq` s with DiffQ. The
    bitwise generator takes 1 ms, the Box-Muller generator `box_muller` ms, and torch's generator `torch` ms.

    kind: the kind of device. others: the share of the machine that other processes used in each turn; a turn is one
    measurement of all variants.
    """
    folder = _folder(plan)
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"processor": "a processor", "device": "of a test", "load": 0.0}
    longer = dict(zip(RECIPES, (1.0, ours, diffq), strict=True))
    rows = [
        {"optimizer": o, "variant": r, "memory": 2**30} | _turns(s, r, others)
        for o in OPTIMIZERS
        for r, s in longer.items()
    ]
    found = [{"model": name, "batch": 1, "length": 1000, "rows": rows} for name in models]
    (folder / f"train-{kind}.json").write_text(json.dumps({"machine": machine, "turns": TURNS, "models": found}))
    arms = {"bitwise": 1e-3, "box-muller": 1e-3 * box_muller, "torch": 1e-3 * torch}
    timed = [
        {"rows": 64, "cols": cols, "what": what, "arm": arm, "elements": 64 * cols} | _turns(s, arm, others)
        for cols in (32, 64)
        for what in ("generator", "forward")
        for arm, s in arms.items()
    ]
    (folder / f"generators-{kind}.json").write_text(json.dumps({"machine": machine, "turns": TURNS, "timed": timed}))


def _turns(seconds: float, arm: str, others: float) -> dict[str, list[float]]:
    """Return an arm's times ("seconds") and the machine's share that others used ("others"), one entry per turn.

    The times differ slightly between turns; their median is the argument `seconds`.
    """
    middle = TURNS // 2
    times = [seconds * (1 + 0.001 * (turn - middle) * len(arm)) for turn in range(TURNS)]
    return {"seconds": times, "others": [others] * TURNS}


def forget_benches(plan: Plan) -> None:
    for path in _folder(plan).glob("*.json"):
        path.unlink()


def _folder(plan: Plan) -> Path:
    return Path(next(iter(plan.trials.values())).folder.path.parent / "bench")
