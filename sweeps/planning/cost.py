"""How long trials take and how much they leave on the disk.

Times come from what was measured in this store. Where it holds nothing alike, those of trials on GPUs are computed from
FLOPs and an assumed share of an H100's peak, and are called assumed; those on CPUs are not known.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

from fewbits.common.atomic import write_json
from fewbits.experiments.devices import PEAK
from fewbits.experiments.trial import Runtime, Trial
from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.models.networks.registry import parameters
from fewbits.models.recipe import Recipe
from fewbits.sweeps.planning.plan import Planned
from fewbits.sweeps.planning.sweep import Resources

NAME = "speeds.json"
STATE_BYTES = 12  # of a checkpoint to a parameter: the weight and AdamW's two moments, in FP32
parameters_of = cache(parameters)

# Assumed where nothing was measured: eager PyTorch's share of an H100's BF16 peak in training models of 0.1 to 1 B
# parameters, and a recipe's speed relative to plain BF16's, which is that of a CPU (docs/measured/training-cost.md).
ASSUMED_GPU, ASSUMED_SHARE = "H100", 0.25
ASSUMED_SPEED = {"e4m3": 0.85, "e2m1": 0.76, "sampler": 0.94, "none": 1.0}


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
        """Return how long the trial takes by what was measured; None where nothing like it was."""
        return self.seconds_on(_device(planned), planned.trial)

    def seconds_on(self, device: str, trial: Trial) -> float | None:
        """Return the same by speeds of the model and recipe, else of the model, else of any model on the device."""
        key = [device, trial.model.name, trial.recipe.name]
        for known in (key, key[:2], key[:1]):
            alike = [speed for name, speed in self._found.items() if name.split("|")[: len(known)] == known]
            if alike:
                return work_of(trial) / (sum(alike) / len(alike))
        return None


def device_asked_for(runtime: Runtime, resources: Resources) -> str:
    """Return the device of a trial that has not been planned, as `speeds.json` names devices."""
    if resources.gpus or runtime.device == "cuda":
        return f"cuda x{resources.ranks}"
    return f"cpu x{runtime.threads * resources.ranks}"


def assumed_seconds(trial: Trial, resources: Resources) -> float | None:
    """Return how long the trial takes on H100s at the assumed share of their peak; None of trials that take no GPU."""
    if not resources.gpus:
        return None
    speed = PEAK[ASSUMED_GPU] * ASSUMED_SHARE * ASSUMED_SPEED[_emulation(trial.recipe)] * resources.ranks
    return work_of(trial) / speed


def _emulation(recipe: Recipe) -> str:
    """Return the row of `ASSUMED_SPEED` that the recipe belongs to: the costliest thing that it does."""
    specs = [slot.spec for _, slot in recipe.operands.items()]
    quantizers = [q for spec in specs if isinstance(spec, Mixture) for q in spec.quantizers]
    quantizers += [spec for spec in specs if isinstance(spec, Quantizer)]
    quantizers = [q for q in quantizers if q.scaling != "none"]
    if any(q.format.exponent_bits + q.format.mantissa_bits < 4 for q in quantizers):
        return "e2m1"
    if quantizers:
        return "e4m3"
    return "none" if recipe.sampler.kind == "none" else "sampler"


def _key(planned: Planned) -> str:
    return f"{_device(planned)}|{planned.trial.model.name}|{planned.trial.recipe.name}"


def _device(planned: Planned) -> str:
    made_of = planned.made_of
    return f"{made_of['device']} x{made_of['threads'] * made_of['ranks']}"


def disk(planned: Iterable[Planned]) -> int:
    """Return the bytes of the checkpoints that are left when all of these are done; tables are small beside them."""
    return sum(disk_of(one.trial, one.runtime, one.keep) for one in planned)


def disk_of(trial: Trial, runtime: Runtime, keep: Collection[int]) -> int:
    """Return the same of one trial, whose checkpoints of the steps `keep` others start from."""
    every = runtime.keep_every
    kept = len({*keep, *runtime.keep_steps}) + (trial.training.steps // every if every else 0)
    count = min(runtime.keep_checkpoints, -(-trial.training.steps // trial.training.checkpoint_every))
    return (count + kept) * STATE_BYTES * parameters_of(trial.model)
