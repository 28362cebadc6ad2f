"""Time the training steps of recipes and of plain BF16, under one or more optimizers.

A variant is a recipe or plain BF16; each variant trains its own copy of the model. In a turn, every variant runs one
step, so other load on the machine affects all variants alike. A variant's share is the median over turns of
(step time of plain BF16 / step time of the variant).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from fewbits.common import terminal
from fewbits.experiments.bench.products import LinearProducts
from fewbits.experiments.bench.step import Step
from fewbits.kernels.bench.measure import OtherProcesses, Ratio, seconds, take_turns
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.registry import linear_parameters, parameters
from fewbits.models.recipe import Recipe

PLAIN = "bf16"  # the name of the variant without a recipe
UNTIMED = 2  # number of turns at the start that are not timed


@dataclass(frozen=True)
class Settings:
    """The size of the batch, and what to measure."""

    batch: int  # number of sequences
    length: int  # tokens of a sequence
    steps: int  # number of turns to time
    eager: int = 0  # number of turns to time with the reference backend (plain torch operators)
    observer: bool = False  # also time each recipe with an observer


@dataclass(frozen=True)
class Row:
    """The results of one variant, a recipe or plain BF16, with one optimizer."""

    variant: str
    optimizer: str
    milliseconds: float  # median time of a step
    tokens_per_second: float
    share: float  # speed relative to plain BF16
    memory: int  # peak bytes of tensors during a step
    seconds: list[float]  # time of the step in each turn
    others: list[float | None]  # by turn: the share of the processors' time that other processes used
    observed: float | None = None  # speed with the observer relative to the speed without it
    eager: float | None = None  # `share`, measured with the reference backend


@dataclass(frozen=True)
class ModelResult:
    """The results of all variants of one model, measured in one run."""

    model: str
    layers: int
    parameters: int
    linear_parameters: int
    batch: int
    length: int
    gemm_milliseconds: float  # median time of all linear layers' products in BF16: no step in BF16 takes less
    rows: list[Row]


def measure(
    config: DecoderConfig,
    recipes: Mapping[str, Recipe],
    optimizers: list[str],
    device: torch.device,
    settings: Settings,
) -> ModelResult:
    """Time plain BF16 and each recipe, with each of the optimizers (adamw, adam-mini)."""
    shape = settings.batch, settings.length + 1
    tokens = torch.randint(0, config.vocab, shape, generator=torch.Generator().manual_seed(0)).to(device)
    gemms = LinearProducts(config, settings.batch * settings.length, device)
    measured = [_compare(config, recipes, optimizer, tokens, gemms, settings) for optimizer in optimizers]
    sizes = (config.layers, parameters(config), linear_parameters(config), settings.batch, settings.length)
    gemm_seconds = median(time for times, _ in measured for time in times)
    return ModelResult(config.name, *sizes, 1e3 * gemm_seconds, [row for _, rows in measured for row in rows])


def first_layers(config: DecoderConfig, layers: int | None) -> DecoderConfig:
    """Return the config of a model with the first `layers` blocks only; None keeps all of them.

    Raise ValueError if the model has fewer blocks.
    """
    if layers is not None and layers > config.layers:
        raise ValueError(f"bench train: --layers {layers}: {config.name} has only {config.layers} blocks")
    return config if layers is None else replace(config, layers=layers, pattern=config.pattern[:layers])


def _compare(
    config: DecoderConfig,
    recipes: Mapping[str, Recipe],
    optimizer: str,
    batch: Tensor,
    gemms: LinearProducts,
    settings: Settings,
) -> tuple[list[float], list[Row]]:
    """Time plain BF16 and each recipe with one optimizer; return the seconds of `gemms` in each turn, and the Rows.

    In a turn, `gemms` (the products of all linear layers) and a step of plain BF16 and of each recipe run once.
    """
    variants: dict[str, Recipe | None] = {PLAIN: None, **recipes}
    steps = {name: Step(config, recipe, optimizer, batch) for name, recipe in variants.items()}
    observed: dict[str, Step] = {}
    if settings.observer:
        observed = {f"{n} observed": Step(config, r, optimizer, batch, observed=True) for n, r in recipes.items()}
    others = OtherProcesses()
    device = batch.device.type
    gemm_times, *times_of_steps = _in_turns(
        [gemms, *steps.values(), *observed.values()], device, settings.steps, others
    )
    times = dict(zip((*steps, *observed), times_of_steps, strict=True))
    slow: dict[str, list[float]] = {}
    if settings.eager:
        with _reference():
            slow = dict(zip(steps, _in_turns(list(steps.values()), device, settings.eager), strict=True))
    rows = [
        Row(
            variant=name,
            optimizer=optimizer,
            milliseconds=1e3 * median(times[name]),
            tokens_per_second=settings.batch * settings.length / median(times[name]),
            share=_speed(times[name], times[PLAIN]),
            memory=step.memory(),
            seconds=times[name],
            others=others.shares,
            observed=_speed(times[f"{name} observed"], times[name]) if f"{name} observed" in times else None,
            eager=_speed(slow[name], slow[PLAIN]) if slow and name != PLAIN else None,
        )
        for name, step in steps.items()
    ]
    return gemm_times, rows


def _speed(ours: list[float], theirs: list[float]) -> float:
    """Return the speed of a variant divided by that of another one: the median of (theirs / ours) over turns.

    ours, theirs: the step times of the variant and of the other one, in each turn.
    """
    return Ratio.of(theirs, ours).median


def _in_turns(
    calls: Sequence[Callable[[], None]], device: str, turns: int, others: OtherProcesses | None = None
) -> list[list[float]]:
    """Time all calls once in each turn; return, for each call, a list with its seconds in every turn.

    device: `cuda`: a call's time includes its work on the GPU.
    turns: the number of timed turns; before them, UNTIMED turns run, and more if `others` needs more time to measure.
    others: records the share of the processors' time that other processes use in each turn; None: do not record it.
    """

    def timed(call: Callable[[], None], number: int) -> float:
        terminal.show(f"timing {number} of {len(calls)}")
        return seconds(call, device)

    timers = [partial(timed, call, number) for number, call in enumerate(calls, 1)]
    times = take_turns(timers, turns, untimed=UNTIMED, patience=math.inf, others=others)
    terminal.clear()
    return times


@contextmanager
def _reference() -> Iterator[None]:
    """Use the reference backend of the kernels while the `with` block runs."""
    before = os.environ.get("FEWBITS_BACKEND")
    os.environ["FEWBITS_BACKEND"] = "reference"
    try:
        yield
    finally:
        del os.environ["FEWBITS_BACKEND"]
        if before is not None:
            os.environ["FEWBITS_BACKEND"] = before
