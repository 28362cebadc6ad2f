"""Estimate how long trials take and how much disk space their checkpoints need.

Times are computed from speeds of earlier trials in the same store. If none of them ran on the trial's device, the time
is computed from the trial's FLOPs: on GPUs with an assumed share of an H100's peak speed, on a CPU with the speed of a
step of a small model that is timed here. Evaluations and the start of trials are left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from fewbits.common.atomic import read_json, write_json
from fewbits.common.wording import clock
from fewbits.experiments.devices import PEAK
from fewbits.experiments.trial import Trial
from fewbits.models.hooks import quantizers_of
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build, flops_per_token, parameters
from fewbits.models.recipe import Recipe
from fewbits.sweeps.planning.plan import Planned, tokens_until
from fewbits.sweeps.planning.store import reached

NAME = "speeds.json"
# Bytes of a checkpoint per parameter, in FP32: the weight and AdamW's two moments. Adam-mini has few second moments.
ADAMW_BYTES, ADAM_MINI_BYTES = 12, 8
parameters_of = cache(parameters)

# Used if nothing was measured. ASSUMED_SHARE: the share of an H100's BF16 peak that eager PyTorch reaches for models of
# 0.1 to 1 B parameters. ASSUMED_SPEED: a recipe's speed relative to plain BF16, by the key that `_emulation` returns,
# measured on a CPU (docs/measured/training-cost.md).
ASSUMED_GPU, ASSUMED_SHARE = "H100", 0.25
ASSUMED_SPEED = {"e4m3": 0.85, "e2m1": 0.76, "sampler": 0.94, "none": 1.0}
ASSUMED = f"computed from FLOPs at an assumed {ASSUMED_SHARE:.0%} of an {ASSUMED_GPU}'s BF16 peak"
TIMED = "from a step of a small model that was timed on this machine"
MEASURED = "from speeds measured in this store"


def remaining(missing: Sequence[Planned], slots: int, speeds: Speeds) -> str:
    """Return how long the missing trials take, for example `about 12:30, 2 at a time, from speeds measured in …`.

    missing: each after its parent. slots: how many run at a time.
    """
    until: dict[str, float] = {}  # by trial id: its seconds and those of its chain of missing parents
    total, sources = 0.0, dict[str, None]()
    for planned in missing:
        seconds, source = speeds.estimate(planned)
        seconds *= 1 - reached(planned.folder) / planned.trial.training.steps
        total, sources[source] = total + seconds, None
        until[planned.id] = seconds + until.get(planned.parent or "", 0.0)
    return f"about {clock(max(total / slots, *until.values()))}, {slots} at a time, {'; '.join(sources)}"


def slots_of(planned: Sequence[Planned]) -> int:
    """Return how many of these trials this machine's CPUs can train at a time; 1 if a trial needs GPUs."""
    if any(trial.resources.gpus for trial in planned):
        return 1
    cpus = max((trial.resources.cpus or 1) * trial.resources.ranks for trial in planned)
    return max(1, int(len(os.sched_getaffinity(0)) // cpus))


def tokens_of(trial: Trial) -> int:
    return tokens_until(trial, trial.training.steps)


def work_of(trial: Trial) -> float:
    """Return the FLOPs of all training steps of the trial."""
    return tokens_of(trial) * flops_per_token(trial.model, trial.training.length)


class Speeds:
    """The training speeds measured in a store, in FLOPs per second, by device, model and recipe (see `_key`)."""

    def __init__(self, runs: Path) -> None:
        self._path = runs / NAME
        stored = read_json(self._path) or {}
        self._speeds = {
            key: float(speed) for key, speed in stored.items() if key.count("|") == 2 and isinstance(speed, int | float)
        }

    def store_speed(self, planned: Planned, tokens_per_second: float) -> None:
        """Store the speed of a trial that has ended, for later estimates."""
        self._speeds[_key(planned)] = tokens_per_second * work_of(planned.trial) / tokens_of(planned.trial)
        write_json(self._path, self._speeds)

    def seconds(self, planned: Planned) -> float | None:
        """Return how many seconds the trial takes, by measured speeds; None if nothing was measured on its device.

        The estimate uses the first of these speeds that was measured on the device: the speed of the same model and
        recipe; the mean speed of the same model over its recipes; the mean speed of all models.
        """
        key = _key(planned).split("|")
        for known in (key, key[:2], key[:1]):
            alike = [speed for name, speed in self._speeds.items() if name.split("|")[: len(known)] == known]
            if alike:
                return work_of(planned.trial) / (sum(alike) / len(alike))
        return None

    def estimate(self, planned: Planned) -> tuple[float, str]:
        """Return the estimated seconds of the trial, and the source as text: MEASURED, TIMED or ASSUMED."""
        if (measured := self.seconds(planned)) is not None:
            return measured, MEASURED
        if planned.resources.gpus:
            speed, ranks, source = PEAK[ASSUMED_GPU] * ASSUMED_SHARE, planned.resources.ranks, ASSUMED
        else:
            speed, ranks, source = _cpu_speed(), int(planned.made_of["threads"]) * planned.resources.ranks, TIMED
        draws = planned.trial.probe.seeds + 1 if planned.trial.is_probe else 1
        return draws * work_of(planned.trial) / (
            speed * ASSUMED_SPEED[_emulation(planned.trial.recipe)] * ranks
        ), source


@cache
def _cpu_speed() -> float:
    """Return the FLOPs per second that a thread of this machine reaches in training steps of a small model in BF16."""
    import torch

    config, length = MODELS["nemotron-nano"], 256
    model, threads = build(config, seed=0), torch.get_num_threads()
    tokens = torch.randint(0, config.vocab, (2, length + 1))
    torch.set_num_threads(1)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        times.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return flops_per_token(config, length) * tokens[:, 1:].numel() / min(times)


def _emulation(recipe: Recipe) -> str:
    """Return the recipe's key in ASSUMED_SPEED: that of its narrowest quantizer, else `sampler` or `none`.

    Quantizers with scaling `none`, which are plain casts, do not count.
    """
    quantizers = [q for spec in recipe.specs for q in quantizers_of(spec) if q.scaling != "none"]
    bits = [q.format.exponent_bits + q.format.mantissa_bits for q in quantizers]
    if bits:
        return "e2m1" if min(bits) < 4 else "e4m3"
    return "none" if recipe.sampler.kind == "none" else "sampler"


def _key(planned: Planned) -> str:
    """Return the trial's key in `speeds.json`: `DEVICE xN|MODEL|RECIPE`, for example `cpu x2|nemotron-nano|mor/block`.

    N is the number of threads of a rank times the number of ranks. A probe's key also has the parts that it varies.
    """
    made_of, trial = planned.made_of, planned.trial
    probe = f" probe {','.join(trial.probe.parts)}" if trial.is_probe else ""
    threads = made_of["threads"] * made_of["ranks"]
    return f"{made_of['device']} x{threads}|{trial.model.name}{probe}|{trial.recipe.label}"


def checkpoint_bytes(trial: Trial) -> int:
    """Return the bytes of one checkpoint of the trial; 0 for a probe, which writes none."""
    each = ADAMW_BYTES if trial.optimizer.kind == "adamw" else ADAM_MINI_BYTES
    return 0 if trial.is_probe else each * parameters_of(trial.model)


def disk(planned: Iterable[Planned]) -> int:
    """Return the bytes of all checkpoints that these trials keep. Their small tables are not counted."""
    return sum(_checkpoints(each) * checkpoint_bytes(each.trial) for each in planned)


def _checkpoints(planned: Planned) -> int:
    training, runtime = planned.trial.training, planned.runtime
    kept = len({*planned.keep, *runtime.keep_steps})
    kept += training.steps // runtime.keep_every if runtime.keep_every else 0
    return kept + min(runtime.keep_checkpoints, -(-training.steps // training.checkpoint_every))
