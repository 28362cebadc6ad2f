"""Made-up results in the folders of a plan of GaussWS's sweeps: losses and bit widths whose truth is known.

Differences between arms are exact: of three seeds the noise is -1, 0 and +1 times its size, in an order of each arm's
own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from fewbits.analysis.engine.frames import Results
from fewbits.models.networks.registry import on_meta
from fewbits.models.observer import TIERS
from fewbits.sweeps.planning.plan import Plan, Planned

Place = str  # sweep/arm, or sweep/arm@rate
OPTIMIZERS, RECIPES = ("adamw", "adam-mini"), ("bf16", "gaussws", "diffq")


@dataclass
class World:
    """What is true."""

    effect: Mapping[Place, float] = field(default_factory=dict)  # on every loss, relative
    apart: Mapping[tuple[Place, str], float] = field(default_factory=dict)  # effect on loss or loss_max alone
    noise: float = 1e-5
    bits: Mapping[str, float] = field(default_factory=dict)  # mean width at the end, by sweep; else 5
    spread: float = 0.2  # of widths in a layer
    to_nine: float = 1.0
    missing: frozenset[Place] = frozenset()
    diverged: frozenset[Place] = frozenset()


def results(plan: Plan, world: World) -> Results:
    """The plan's, in this world; nothing is left of another one, and what is the same in both is not made again."""
    places = _places(plan)
    for key, planned in plan.trials.items():
        path, truth = planned.folder.path, _truth(places[key], world)
        if _MADE.get(path) != truth:
            shutil.rmtree(path, ignore_errors=True)
            if not places[key] & world.missing:
                _write(plan, planned, places[key], world)
            _MADE[path] = truth
    return Results(plan)


_MADE: dict[Path, object] = {}  # what lies in a trial's folder


def _truth(places: set[Place], world: World) -> object:
    of = frozenset(places)
    widths = tuple(world.bits.get(place.partition("/")[0]) for place in sorted(places))
    gone = of & world.diverged, of & world.missing
    alone = tuple(_effect(places, world, metric) for metric in ("loss", "loss_max"))
    return _effect(places, world), alone, widths, world.noise, world.spread, world.to_nine, *gone


def _effect(places: set[Place], world: World, metric: str = "") -> float:
    """Of the place that says most: a rate's before its arm's."""
    alone = [world.apart[place, metric] for place in sorted(places) if (place, metric) in world.apart]
    return (
        alone[0]
        if alone
        else next((world.effect[place] for place in sorted(places, reverse=True) if place in world.effect), 0.0)
    )


def _places(plan: Plan) -> dict[str, set[Place]]:
    found: dict[str, set[Place]] = {key: set() for key in plan.trials}
    for member in plan.members:
        place = f"{member.cell.sweep}/{member.cell.arm}"
        found[member.id] |= {place, *(f"{place}@{value}" for _, value in member.cell.axes)}
    return found


def _write(plan: Plan, planned: Planned, places: set[Place], world: World) -> None:
    folder = planned.folder
    folder.path.mkdir(parents=True)
    gone = bool(places & world.diverged)
    steps = planned.trial.training.steps // (2 if gone else 1)
    metrics = list(_metrics(plan, planned, places, world, steps))
    pd.DataFrame(metrics).to_parquet(folder.path / "metrics.parquet")
    if rows := list(_widths(planned, places, world, steps)):
        pd.DataFrame(rows).to_parquet(folder.path / "numerics.parquet")
    status = {"id": folder.id, "status": "diverged" if gone else "done", "step": steps}
    (folder.path / "result.json").write_text(json.dumps({**metrics[-1], **status}))


def _metrics(plan: Plan, planned: Planned, places: set[Place], world: World, steps: int) -> Iterator[dict[str, Any]]:
    trial, begun = planned.trial, 0
    if planned.parent is not None:
        begun = plan.trials[planned.parent].trial.training.steps
    arm = sorted(places)[0].partition("/")[2]
    wave = 0.0 if arm.startswith("bf16") and arm != "bf16-again" else (trial.seed + sum(arm.encode())) % 3 - 1

    def level(metric: str = "") -> float:
        return (2.0 + 0.01 * trial.seed) * (1 + _effect(places, world, metric) + world.noise * wave)

    loss = level()
    for step in range(9, steps, 10):  # all have a multiple of 10
        row = {
            "step": step,
            "tokens": 1024 * (begun + step + 1),
            "loss": level("loss"),
            "loss_max": 1.05 * level("loss_max"),
        }
        if step + 1 == steps:
            row |= {"validation_loss": 1.1 * loss, "ood_loss": 1.3 * loss, "parameter_norm": 30.0}
        yield row


def _widths(planned: Planned, places: set[Place], world: World, steps: int) -> Iterator[dict[str, Any]]:
    trial = planned.trial
    sampler = trial.recipe.sampler
    if sampler.kind == "none":
        return
    end = next((world.bits[place.partition("/")[0]] for place in places if place.partition("/")[0] in world.bits), 5.0)
    names = [n for n, m in on_meta(trial.model).named_modules() if isinstance(m, nn.Linear) and n.startswith("blocks.")]
    for part, step in ((0.5, steps // 2 - 1), (1.0, steps - 1)):
        for name in names:
            mean = sampler.init + part * (end - sampler.init) + 0.001 * trial.seed
            row = {
                "step": step,
                "layer": name,
                "block": int(name.split(".")[1]),
                "part": "qkv" if name.split(".")[-1] in "qkv" else name.split(".")[-1].replace("gate", "up"),
            }
            row |= {"bits_mean": mean, "bits_std": world.spread, "bits_min": mean - 1, "bits_max": mean + 1}
            yield row | {"slot": "weight"} | {f"bits_to_{t}": world.to_nine if t == 9 else 1.0 for t in TIERS}


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
) -> None:
    """Times of plain BF16 are 1 s, others as many; of the bitwise generator 1 ms, others as many times longer."""
    folder = next(iter(plan.trials.values())).folder.path.parent / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"processor": "a processor", "device": "of a test", "load": 0.0}
    longer = dict(zip(RECIPES, (1.0, ours, diffq), strict=True))
    rows = [
        {"optimizer": o, "variant": r, "seconds": [s * (1 + 0.001 * t) for t in range(5)], "memory": 2**30}
        for o in OPTIMIZERS
        for r, s in longer.items()
    ]
    found = [{"model": name, "batch": 1, "length": 1000, "rows": rows} for name in models]
    (folder / f"train-{kind}.json").write_text(json.dumps({"machine": machine, "turns": 5, "models": found}))
    arms = {"bitwise": 1e-3, "box-muller": 1e-3 * box_muller, "torch": 1e-3 * torch}
    timed = [
        {
            "rows": 64,
            "cols": cols,
            "what": what,
            "arm": arm,
            "elements": 64 * cols,
            "seconds": [s * (1 + 0.001 * turn * len(arm)) for turn in range(5)],
        }
        for cols in (32, 64)
        for what in ("generator", "forward")
        for arm, s in arms.items()
    ]
    (folder / f"generators-{kind}.json").write_text(json.dumps({"machine": machine, "turns": 5, "timed": timed}))
