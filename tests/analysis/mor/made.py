"""Write simulated results of MoR's sweeps into the run folders of a plan, without training."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pandas as pd

from fewbits.kernels.quantizer import Mixture
from fewbits.models.observer import BINS
from fewbits.models.recipe import Recipe
from fewbits.sweeps.planning.plan import Plan, Planned
from tests.analysis.probes import write_probe

PARTS = ("qkv", "out", "up", "down")
SHARED = ("fprop.x", "fprop.w", "dgrad.dy")
APART = (*SHARED, "dgrad.w", "wgrad.dy", "wgrad.x")
WINDOWS = 3


def fill(plan: Plan, *, without: Collection[str] = (), diverged: Collection[str] = ()) -> None:
    """Write a result for every trial, except trials of the arms `without`.

    Trials of the arms `diverged` end as diverged after half of the steps.
    """
    arms: dict[str, set[str]] = {}
    for member in plan.members:
        arms.setdefault(member.id, set()).add(str(member.cell.arm))
    for key, planned in plan.trials.items():
        if arms.get(key, set()) & set(without):
            continue
        if planned.trial.is_probe:
            _write_probe(planned, min(arms[key]))
        else:
            write(plan, planned, ended=bool(arms.get(key, set()) & set(diverged)))


def _write_probe(planned: Planned, arm: str) -> None:
    folder, trial = planned.folder, planned.trial
    folder.path.mkdir(parents=True)
    numbers = write_probe(folder.path, arm, trial, noise=0.01 * trial.seed)
    pd.DataFrame(_numerics(trial.recipe, trial.seed, WINDOWS)).to_parquet(folder.path / "numerics.parquet")
    (folder.path / "result.json").write_text(json.dumps({"id": folder.id, "status": "done", "step": 2} | numbers))


def write(plan: Plan, planned: Planned, *, ended: bool) -> None:
    folder, trial = planned.folder, planned.trial
    steps = trial.training.steps // (2 if ended else 1)
    folder.path.mkdir(parents=True)
    metrics = list(_metrics(plan, planned, steps))
    pd.DataFrame(metrics).to_parquet(folder.path / "metrics.parquet")
    pd.DataFrame(_numerics(trial.recipe, trial.seed, steps)).to_parquet(folder.path / "numerics.parquet")
    status = {"id": folder.id, "status": "diverged" if ended else "done"}
    (folder.path / "result.json").write_text(json.dumps({**metrics[-1], **status, "step": steps}))


def _metrics(plan: Plan, planned: Planned, steps: int) -> Iterator[dict[str, Any]]:
    trial, begun = planned.trial, 0
    if planned.parent is not None:
        begun = plan.trials[planned.parent].trial.training.steps
    noise = np.random.default_rng(int(planned.id[:8], 16)).standard_normal()
    harm = 1 + 0.001 * (len(trial.recipe.name) % 5) + 0.0002 * noise
    for step in range(steps):
        at = begun + step + 1
        loss = harm * (1.5 + 4 / (1 + at / 20)) + 0.01 * trial.seed
        row = {"step": step, "tokens": 2048 * at, "loss": loss}
        if (step + 1) % max(1, steps // 2) == 0:
            row |= {"validation_loss": loss, "ood_loss": 1.1 * loss, "parameter_norm": 30 + at / 100}
        yield row


def _numerics(recipe: Recipe, seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of numerics.parquet for recipes with a mixture; other recipes have none.

    The error is 0.0225, with noise, except for FC2's input, whose error is greater, increases over the windows and
    decreases from block to block.
    """
    spelled = str(recipe.operands["fprop.x"].spec or "")
    if "|" not in spelled:
        return
    test = Mixture.parse(spelled).entries[0].test
    threshold = getattr(test, "threshold", 0.045)
    for window in range(1, WINDOWS + 1):
        step = steps * window // WINDOWS - 1
        for block in range(6):
            for part in PARTS:
                for slot in APART if "channel" in spelled else SHARED:
                    error = 0.0225 + (0.006 * (6 - block) * window if (part, slot) == ("down", "fprop.x") else 0)
                    errors = error * (1 + 0.1 * np.random.default_rng([seed, step, block]).standard_normal(10))
                    histogram = np.histogram(errors.clip(0), BINS)[0]
                    high = float(np.mean(errors >= threshold))
                    yield {
                        "step": step,
                        "layer": f"blocks.{block}.{part}",
                        "block": block,
                        "part": part,
                        "slot": slot,
                        "quantizer": spelled,
                        "batches": 10,
                        "error": float(errors.mean()),
                        "error_max": float(errors.max()),
                        "histogram": histogram.tolist(),
                        "share_0": 1 - high,
                        "share_1": high,
                        "share_2": 0.0,
                        "share_3": 0.0,
                    }
