"""Compute the learning rate over a trial as a pure function: update `step` uses peak · `factor(config, step, steps)`.

Updates are numbered from 0 to steps − 1. W is the number of warm-up updates. The decay starts at update D. D is W for
`linear` and `cosine`, steps − decay_fraction·steps for `wsd` (warm-up, stable, decay), and steps for `constant`:

    warm-up   step < W        (step + 1) / (W + 1)
    plateau   W ≤ step < D    1
    decay     D ≤ step        f + (1 − f)·shape((step − D) / (steps − D)),    f = final_ratio, shape falls from 1 to 0

Neither the first nor the last update has the rate 0. The factor of the last update is
f + (1 − f)·shape(1 − 1/(steps − D)); one update later it would be f. nanoGPT's cosine and torchtitan's linear schedule
have this form. With `ScheduleConfig(kind="linear")`, a branch decays from the peak to 0 over its own updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# The shape of a decay, as a function of the fraction of the decay that is done.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "sqrt": lambda done: 1 - math.sqrt(done),
}
KINDS = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True)
class ScheduleConfig:
    """The settings of a learning-rate schedule, for trials of any length.

    The warm-up lasts for warmup_steps updates, or for the fraction warmup_fraction of all updates. At most one of the
    two may be above 0. If both are 0, there is no warm-up.
    """

    kind: str = "linear"
    warmup_steps: int = 0
    warmup_fraction: float = 0.0
    final_ratio: float = 0.0  # the lowest learning rate divided by the peak
    decay_fraction: float = 0.2  # only wsd: decay at the last 20 % of updates; NVFP4: 0.2 for 12B, 0.15 for 8B and 1.2B
    decay_shape: str = "linear"  # only wsd: a key of SHAPES; assumed, the NVFP4 paper does not state it

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown schedule {self.kind!r}: valid schedules are {', '.join(KINDS)}")
        if self.decay_shape not in SHAPES:
            raise ValueError(f"unknown decay_shape {self.decay_shape!r}: valid shapes are {', '.join(SHAPES)}")
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps={self.warmup_steps}: the number of updates has to be 0 or more")
        if self.warmup_steps and self.warmup_fraction:
            both = f"schedule.warmup_steps={self.warmup_steps} and schedule.warmup_fraction={self.warmup_fraction}"
            raise ValueError(f"{both}: set one of the two to 0")
        for name in ("warmup_fraction", "final_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name}={getattr(self, name)}: valid values are numbers from 0 to 1")


def factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate of update `step` (from 0) of `steps`, divided by the peak learning rate."""
    if not 0 <= step < steps:
        raise ValueError(f"update {step} of a trial of {steps} updates: valid numbers are 0 to {steps - 1}")
    warmup, decay = phases(config, steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if step < decay:
        return 1.0
    shape = SHAPES[config.decay_shape if config.kind == "wsd" else config.kind]
    return config.final_ratio + (1 - config.final_ratio) * shape((step - decay) / (steps - decay))


def phases(config: ScheduleConfig, steps: int) -> tuple[int, int]:
    """Return the number of warm-up updates, and the update at which decay starts (`steps` if there is no decay)."""
    warmup = config.warmup_steps or _part(config.warmup_fraction, steps)
    if config.kind == "constant":
        decay = steps
    elif config.kind == "wsd":
        decay = steps - _part(config.decay_fraction, steps)
    else:
        decay = warmup
    longest = min(decay, steps - 1)
    if warmup > longest:
        raise ValueError(
            f"schedule.warmup_steps or schedule.warmup_fraction gives {warmup} warm-up updates in a trial of {steps} "
            f"updates (schedule {config.kind}): valid numbers are 0 to {longest}"
        )
    return warmup, decay


def _part(fraction: float, steps: int) -> int:
    """Return a fraction of a trial as a number of updates: 0 for the fraction 0, else at least 1."""
    return max(1, round(fraction * steps)) if fraction else 0
