"""Estimate how long trials take and how much disk their checkpoints need.

Times come from the speeds measured in this store. Without a similar measurement, times of trials on GPUs are computed
from FLOPs and an assumed share of an H100's peak, and are marked as assumed; times on CPUs are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from fewbits.common.atomic import read_json, write_json
from fewbits.experiments.devices import PEAK
from fewbits.experiments.trial import Trial
from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.models.networks.registry import parameters
from fewbits.models.recipe import Recipe
from fewbits.sweeps.planning.plan import Planned

NAME = "speeds.json"
STATE_BYTES = 12  # bytes of a checkpoint per parameter: the weight and AdamW's two moments, in FP32
parameters_of = cache(parameters)

# Assumed if nothing was measured: eager PyTorch's share of an H100's BF16 peak for models of 0.1 to 1 B parameters, and
# a recipe's speed relative to plain BF16, which was measured on a CPU (docs/measured/training-cost.md).
ASSUMED_GPU, ASSUMED_SHARE = "H100", 0.25
ASSUMED_SPEED = {"e4m3": 0.85, "e2m1": 0.76, "sampler": 0.94, "none": 1.0}
ASSUMED = f"computed from FLOPs at an assumed {ASSUMED_SHARE:.0%} of an {ASSUMED_GPU}'s BF16 peak"
MEASURED = "from speeds measured in this store"


def tokens_of(trial: Trial) -> int:
    return trial.training.steps * trial.training.batch * trial.training.length


def work_of(trial: Trial) -> float:
    """Return the FLOPs of training the trial."""
    from fewbits.experiments.training import flops_a_token

    return tokens_of(trial) * flops_a_token(trial)


class Speeds:
    """The training speeds measured in a store, in FLOPs per second, by device, model and recipe."""

    def __init__(self, runs: Path) -> None:
        self._path = runs / NAME
        stored = read_json(self._path) or {}
        self._speeds = {
            key: float(speed) for key, speed in stored.items() if key.count("|") == 2 and isinstance(speed, int | float)
        }

    def measured(self, planned: Planned, tokens_per_second: float) -> None:
        """Store the speed of a trial."""
        self._speeds[_key(planned)] = tokens_per_second * work_of(planned.trial) / tokens_of(planned.trial)
        write_json(self._path, self._speeds)

    def started(self, backend: str, seconds: float) -> None:
        """Store the seconds from the start of a sweep to its first trial."""
        self._speeds[f"start|{backend}|"] = seconds
        write_json(self._path, self._speeds)

    def start(self, backend: str) -> float:
        """Return the measured seconds from the start of a sweep to its first trial; 0 if unknown."""
        return self._speeds.get(f"start|{backend}|", 0.0)

    def seconds(self, planned: Planned) -> float | None:
        """Return an estimate of the trial's seconds from measured speeds; None if nothing was measured on its device.

        It uses the speed of the same model and recipe. If that was not measured, it uses the mean speed of the model's
        recipes, or else of all models on the device.
        """
        key = _key(planned).split("|")
        for known in (key, key[:2], key[:1]):
            alike = [speed for name, speed in self._speeds.items() if name.split("|")[: len(known)] == known]
            if alike:
                return work_of(planned.trial) / (sum(alike) / len(alike))
        return None

    def estimate(self, planned: Planned) -> tuple[float | None, str]:
        """Return the estimated seconds of the trial, and the source of the estimate.

        The source is measured speeds, or FLOPs and an assumed speed. The seconds are None if neither is available: for
        a trial on a CPU without measured speeds.
        """
        measured = self.seconds(planned)
        return (_assumed_seconds(planned), ASSUMED) if measured is None else (measured, MEASURED)


def _assumed_seconds(planned: Planned) -> float | None:
    """Return the seconds of the trial on H100s at the assumed share of their peak; None if it uses no GPU."""
    if not planned.resources.gpus:
        return None
    speed = PEAK[ASSUMED_GPU] * ASSUMED_SHARE * ASSUMED_SPEED[_emulation(planned.trial.recipe)]
    return work_of(planned.trial) / (speed * planned.resources.ranks)


def _emulation(recipe: Recipe) -> str:
    """Return the key of `ASSUMED_SPEED` for the recipe: that of its most expensive operation."""
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
    made_of = planned.made_of
    device = f"{made_of['device']} x{made_of['threads'] * made_of['ranks']}"
    trial = planned.trial
    probe = f" probe {','.join(trial.probe.parts)}" if trial.is_probe else ""
    return f"{device}|{trial.model.name}{probe}|{trial.recipe.label}"


def checkpoint_bytes(trial: Trial) -> int:
    """Return the bytes of one checkpoint of the trial; a probe writes none."""
    return 0 if trial.is_probe else STATE_BYTES * parameters_of(trial.model)


def disk(planned: Iterable[Planned]) -> int:
    """Return the bytes of the checkpoints that these trials keep. Their tables are small and are not counted."""
    return sum(map(_disk, planned))


def _disk(planned: Planned) -> int:
    training, runtime = planned.trial.training, planned.runtime
    kept = len({*planned.keep, *runtime.keep_steps})
    kept += training.steps // runtime.keep_every if runtime.keep_every else 0
    count = min(runtime.keep_checkpoints, -(-training.steps // training.checkpoint_every))
    return (count + kept) * checkpoint_bytes(planned.trial)
