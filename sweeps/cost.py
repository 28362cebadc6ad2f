"""How long trials take and how much they leave on the disk: from what was measured on this store, never guessed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from fewbits.experiments.atomic import write_json
from fewbits.experiments.trial import Trial
from fewbits.models.registry import parameters
from fewbits.sweeps.plan import Planned

NAME = "speeds.json"
STATE_BYTES = 12  # of a checkpoint to a parameter: the weight and AdamW's two moments, in FP32
parameters_of = cache(parameters)


def tokens_of(trial: Trial) -> int:
    return trial.training.steps * trial.training.batch * trial.training.length


def work_of(trial: Trial) -> float:
    """FLOPs."""
    from fewbits.experiments.training import flops_a_token

    return tokens_of(trial) * flops_a_token(trial)


class Speeds:
    """FLOPs a second of trials that were run here, by what they depend on."""

    def __init__(self, runs: Path) -> None:
        self._path = runs / NAME
        try:
            found = json.loads(self._path.read_text("utf-8"))
            self._found = {key: float(speed) for key, speed in found.items() if key.count("|") == 2}
        except (OSError, ValueError, TypeError, AttributeError):
            self._found = {}

    def measured(self, planned: Planned, tokens_per_second: float) -> None:
        self._found[_key(planned)] = tokens_per_second * work_of(planned.trial) / tokens_of(planned.trial)
        write_json(self._path, self._found)

    def started(self, backend: str, seconds: float) -> None:
        """From the command to its first trial."""
        self._found[f"start|{backend}|"] = seconds
        write_json(self._path, self._found)

    def start(self, backend: str) -> float:
        return self._found.get(f"start|{backend}|", 0.0)

    def seconds(self, planned: Planned) -> float | None:
        """Of the same model and recipe, else of the same model, else of any on such a device; None: of none yet."""
        device, model, _ = key = _key(planned).split("|")
        for known in (key, [device, model], [device]):
            alike = [speed for name, speed in self._found.items() if name.split("|")[: len(known)] == list(known)]
            if alike:
                return work_of(planned.trial) / (sum(alike) / len(alike))
        return None


def _key(planned: Planned) -> str:
    made_of, trial = planned.made_of, planned.trial
    device = f"{made_of['device']} x{made_of['threads'] * made_of['ranks']}"
    return f"{device}|{trial.model.name}|{trial.recipe.name}"


def disk(planned: Iterable[Planned]) -> int:
    """Bytes of the checkpoints that are left when all of these are done; tables are small beside them."""
    found = 0
    for one in planned:
        every = one.runtime.keep_every
        kept = len({*one.keep, *one.runtime.keep_steps}) + (one.trial.training.steps // every if every else 0)
        count = min(one.runtime.keep_checkpoints, -(-one.trial.training.steps // one.trial.training.checkpoint_every))
        found += (count + kept) * STATE_BYTES * parameters_of(one.trial.model)
    return found
