"""Write simulated results of NVFP4's sweeps, without training: losses and gradient errors with known true values."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.registry import on_meta
from fewbits.sweeps.planning.plan import Plan, Planned
from tests.analysis.probes import write_probe

NOISE = 2e-4  # the relative standard deviation of losses over seeds


def fill(
    plan: Plan,
    effects: Mapping[tuple[str, str], float],
    *,
    without: Collection[tuple[str, str]] = (),
    diverged: Collection[tuple[str, str]] = (),
) -> None:
    """Write a result for every trial of the plan.

    effects: (sweep, arm) → relative change of the losses. without: (sweep, arm) of trials that get no result.
    diverged: (sweep, arm) of trials that diverge after half of the steps.
    """
    places: dict[str, set[tuple[str, str]]] = {}
    for member in plan.members:
        places.setdefault(member.id, set()).add((member.cell.sweep, str(member.cell.arm)))
    for key, planned in plan.trials.items():
        of = places.get(key, set())
        if not of & set(without):
            effect = next((effects[place] for place in sorted(of) if place in effects), 0.0)
            if planned.trial.is_probe:
                _write_probe(planned, min(arm for _, arm in of))
                continue
            _write(plan, planned, effect, ended=bool(of & set(diverged)))


def _write_probe(planned: Planned, arm: str) -> None:
    folder = planned.folder
    folder.path.mkdir(parents=True)
    numbers = write_probe(folder.path, arm, planned.trial, noise=0.01 * planned.trial.seed)
    (folder.path / "result.json").write_text(json.dumps({"id": folder.id, "status": "done", "step": 2} | numbers))


def _write(plan: Plan, planned: Planned, effect: float, *, ended: bool) -> None:
    folder, trial = planned.folder, planned.trial
    steps = trial.training.steps // (2 if ended else 1)
    folder.path.mkdir(parents=True)
    metrics = list(_metrics(plan, planned, effect, steps))
    pd.DataFrame(metrics).to_parquet(folder.path / "metrics.parquet")
    if gradients := list(_gradients(planned, steps)):
        pd.DataFrame(gradients).to_parquet(folder.path / "numerics.parquet")
    status = {"id": folder.id, "status": "diverged" if ended else "done", "step": steps}
    (folder.path / "result.json").write_text(json.dumps({**metrics[-1], **status}))


def _metrics(plan: Plan, planned: Planned, effect: float, steps: int) -> Iterator[dict[str, Any]]:
    trial = planned.trial
    of_step = trial.training.batch * trial.training.length
    begun = _tokens_before(plan, planned)
    # The noise must not depend on the trial's id, which changes with the sources.
    drawn_by = (trial.seed, trial.model, trial.recipe, trial.training)
    noise = NOISE * np.random.default_rng(zlib.crc32(repr(drawn_by).encode())).standard_normal()
    for step in range(steps):
        tokens = begun + of_step * (step + 1)
        loss = (1.5 + 4 / (1 + tokens / (20 * of_step)) + 0.01 * trial.seed) * (1 + effect + noise)
        row = {"step": step, "tokens": tokens, "loss": loss}
        if (step + 1) % trial.evaluation.every == 0 or step + 1 == steps:
            row |= {"validation_loss": loss, "ood_loss": 1.1 * loss, "parameter_norm": 30.0}
        yield row


def _tokens_before(plan: Plan, planned: Planned) -> int:
    if planned.parent is None:
        return 0
    parent = plan.trials[planned.parent]
    training = parent.trial.training
    steps = planned.trial.branch.step or training.steps
    return _tokens_before(plan, parent) + steps * training.batch * training.length


def _gradients(planned: Planned, steps: int) -> Iterator[dict[str, Any]]:
    """Yield rows with errors of the weight gradient: 10 %, 11 %, 12 % … by block, and 0 in blocks that stay in BF16.

    Only the recipes nvfp4 and nvfp4-base have rows.
    """
    trial = planned.trial
    if trial.recipe.name not in ("nvfp4", "nvfp4-base"):
        return
    keep, parts = trial.recipe.keep, parts_of(trial.model)
    for block, names in enumerate(parts):
        high = block < keep.first or block >= len(parts) - keep.last
        for part in names:
            error = 0.0 if high else 0.1 + 0.01 * block
            row = {"step": steps - 1, "layer": f"blocks.{block}.{part}", "block": block, "part": part, "slot": "weight"}
            yield row | {"gradient_error": error}


@cache
def parts_of(model: DecoderConfig) -> list[list[str]]:
    """Return, for each block of the model, the parts of its linear layers, such as qkv, out, up and down."""
    blocks = on_meta(model).blocks
    assert isinstance(blocks, Iterable)
    return [[str(m.part) for m in block.modules() if isinstance(m, Linear)] for block in blocks]
