"""Run folders of trials that nobody trained: a plan of MoR's sweeps, with results whose truth is known.

Differences between arms are exact: of three seeds the noise is -1, 0 and +1 times its size, in an order of each arm's
own, so that means are what the world says and spreads are its noise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from pandas import DataFrame

from fewbits.analysis.frames import Results
from fewbits.analysis.mor.numerics import PARTS, high
from fewbits.kernels.quantizer import Mixture
from fewbits.models.observer import BINS
from fewbits.sweeps.plan import Member, Plan, plan
from fewbits.sweeps.sweep import load_sweeps

SMALL = (
    "model.layers=4",
    "data=synthetic",
    "data.size=65536",
    "evaluation.windows=2",
    "runtime.device=cpu",
)
STEPS, BATCHES = 20, 100  # rows of the metrics; mini-batches of a window
FLOOR = 0.0225  # of E4M3

Tensors = Callable[[str, str, int, str, str, bool], float]  # arm, configuration, block from 1, part, slot, at the end


def _floor(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    return FLOOR


def _none(arm: str, configuration: str, block: int, part: str, slot: str, end: bool) -> float:
    return 0.0


@dataclass
class World:
    """What is true."""

    effect: Mapping[str, float] = field(default_factory=dict)  # of an arm, or arm@axis value, on every loss; relative
    elsewhere: Mapping[str, float] = field(default_factory=dict)  # on the out-of-domain loss, in its place
    norm: Mapping[str, float] = field(default_factory=dict)  # on the parameter norm halfway
    noise: float = 1e-5  # of losses, between arms
    wobble: float = 1e-5  # of errors and shares, between seeds
    error: Tensors = _floor
    fallback: Tensors = _none
    diverged: frozenset[str] = frozenset()  # arms, or arm@axis value
    missing: frozenset[tuple[str, int]] = frozenset()  # arms and seeds
    below: float | None = None  # share of watched mini-batches in the lowest bin of the threshold's side, else by error


def planned(folder: Path, cache_folder: Path, *words: str) -> Plan:
    where = (f"runtime.runs={folder / 'runs'}", f"runtime.cache={cache_folder}")
    return plan(*load_sweeps(("study=mor", *words, *SMALL, *where)))


def results(of: Plan, world: World) -> Results:
    """The plan's, in this world; nothing is left of another one."""
    for member in {member.id: member for member in reversed(of.members)}.values():
        path = of.trials[member.id].folder.path
        shutil.rmtree(path, ignore_errors=True)
        if (member.cell.arm, member.cell.seed) not in world.missing:
            path.mkdir(parents=True)
            _write(of, member, path, world)
    return Results.of(of)


def _write(of: Plan, member: Member, path: Path, world: World) -> None:
    arm, seed = member.cell.arm, member.cell.seed
    steps = of.trials[member.id].trial.training.steps
    name = next((f"{arm}@{value}" for _, value in member.cell.axes if f"{arm}@{value}" in world.effect), arm)
    factor = 1 + world.effect.get(name, 0.0) + world.noise * _wave(arm, seed)
    loss = (2.0 + 0.1 * seed) * factor
    other = 3.0 * (1 + world.elsewhere.get(arm, world.effect.get(name, 0.0)) + world.noise * _wave(arm, seed))
    norms = [30.0, 35.0 * (1 + world.norm.get(arm, 0.0)), 40.0]
    result = {"id": of.trials[member.id].folder.id, "name": path.name, "status": "done", "step": steps}
    numbers = {"loss": loss, "validation_loss": loss + 0.2, "ood_loss": other, "parameter_norm": norms[-1]}
    numbers["validation_loss"] = 1.1 * loss
    if world.diverged & {arm, *(f"{arm}@{value}" for _, value in member.cell.axes)}:
        result |= {"status": "diverged", "step": steps // 2}
        numbers = {"loss": 9.0}
    (path / "result.json").write_text(json.dumps(result | numbers))
    at = np.linspace(0, steps - 1, STEPS).astype(int)
    curve = {"step": at, "tokens": (at + 1) * 2048, "loss": loss + (steps - 1 - at) / steps}
    evaluated = {key: [np.nan] * STEPS for key in ("validation_loss", "ood_loss", "parameter_norm")}
    for place, norm in zip((0, STEPS // 2, STEPS - 1), norms, strict=True):
        evaluated["parameter_norm"][place] = norm
    evaluated["validation_loss"][-1], evaluated["ood_loss"][-1] = 1.1 * loss, other
    DataFrame(curve | evaluated).to_parquet(path / "metrics.parquet")
    _numerics(of, member, world).to_parquet(path / "numerics.parquet")


def _numerics(of: Plan, member: Member, world: World) -> DataFrame:
    trial, arm, seed = of.trials[member.id].trial, member.cell.arm, member.cell.seed
    configuration = dict(member.cell.axes).get("configuration", "1")
    operands = {slot: str(o.spec) for slot, o in trial.recipe.operands.items() if isinstance(o.spec, Mixture)}
    if not any(":channel:" in spelled or "1x" in spelled for spelled in operands.values()):
        operands = {slot: spelled for slot, spelled in operands.items() if slot in ("fprop.x", "fprop.w", "dgrad.dy")}
    rows = []
    for end in (False, True):
        for block in range(trial.model.layers):
            for part in PARTS:
                labels = {"step": trial.training.steps - 1 if end else 9, "block": block, "part": part}
                rows.append(labels | {"slot": "weight"})
                for slot, spelled in operands.items():
                    of_this = (arm, configuration, block + 1, part, slot, end)
                    error = world.error(*of_this) + world.wobble * _wave(slot + part, seed)
                    share = min(1.0, max(0.0, world.fallback(*of_this) + world.wobble * _wave(slot + part, seed)))
                    rows.append(labels | {"slot": slot} | _row(spelled, error, share, world.below))
    return DataFrame(rows).assign(layer="")


def _row(spelled: str, error: float, share: float, below: float | None) -> dict[str, object]:
    counts = [0] * (len(BINS) - 1)
    if below is None:
        counts[int(np.searchsorted(BINS, error, side="right")) - 1] = BATCHES
    else:
        counts[8], counts[9] = round(BATCHES * below), BATCHES - round(BATCHES * below)
    shares = [1 - share, 0.0, 0.0, 0.0]
    place = high(spelled)
    assert place
    shares[place] += share
    taken = {f"share_{entry}": value for entry, value in enumerate(shares)}
    seen = {"quantizer": spelled, "batches": BATCHES, "error": error, "error_max": 1.1 * error, "histogram": counts}
    return seen | taken


@cache
def _order(name: str) -> int:
    return sum(name.encode())


def _wave(name: str, seed: int) -> float:
    """-1, 0, 1 over three seeds, the baseline without any."""
    return 0.0 if name == "bf16" or name == "watched" else float((seed + _order(name)) % 3 - 1)
