"""Time the training steps of recipes and of plain BF16, under one or more optimizers.

A variant is a recipe or plain BF16; each variant trains its own copy of the model. In a turn, every variant runs one
step, so other load on the machine affects all variants alike. A variant's share is the median over turns of (step time
of plain BF16 / step time of the variant).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from fewbits.common import terminal
from fewbits.experiments.bench.measure import OtherProcesses, Ratio, seconds, take_turns
from fewbits.experiments.optimization.optimizers import OptimizerConfig, clip_gradients, make_optimizer
from fewbits.kernels.products import matmul
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.partition import partition_of
from fewbits.models.networks.registry import build, linear_parameters, on_meta, parameters
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.recipe import Recipe

PLAIN = "bf16"  # the name of the variant without a recipe
UNTIMED = 2  # number of turns at the start that are not timed


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
    optimizers: Sequence[str],
    device: torch.device,
    *,
    batch: int,
    length: int,
    steps: int,
) -> ModelResult:
    """Time plain BF16 and each recipe, with each of the optimizers (adamw, adam-mini, muon).

    batch: the number of sequences. length: tokens of a sequence. steps: the number of timed turns.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab, (batch, length + 1), generator=generator).to(device)
    gemms = LinearProducts(config, batch * length, device)
    measured = [_compare(config, recipes, optimizer, tokens, gemms, steps) for optimizer in optimizers]
    sizes = (config.layers, parameters(config), linear_parameters(config), batch, length)
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
    turns: int,
) -> tuple[list[float], list[Row]]:
    """Time plain BF16 and each recipe with one optimizer; return the seconds of `gemms` in each turn, and the Rows.

    In a turn, `gemms` (the products of all linear layers) and a step of plain BF16 and of each recipe run once.
    """
    variants: dict[str, Recipe | None] = {PLAIN: None, **recipes}
    steps = {name: Step(config, recipe, optimizer, batch) for name, recipe in variants.items()}
    calls: list[Callable[[], None]] = [gemms, *steps.values()]
    others = OtherProcesses()

    def timed(call: Callable[[], None], number: int) -> float:
        terminal.show(f"timing {number} of {len(calls)}")
        return seconds(call, batch.device.type)

    timers = [partial(timed, call, number) for number, call in enumerate(calls, 1)]
    of_gemms, *times = take_turns(timers, turns, untimed=UNTIMED, patience=math.inf, others=others)
    terminal.clear()
    rows = []
    for (name, step), its in zip(steps.items(), times, strict=True):
        milliseconds, speed = 1e3 * median(its), gemms.tokens / median(its)
        share = Ratio.of(times[0], its).median
        rows.append(Row(name, optimizer, milliseconds, speed, share, step.memory(), its, others.shares))
    return of_gemms, rows


class LinearProducts:
    """A callable that runs the three products (fprop, dgrad, wgrad) of each linear layer and the output head, in BF16.

    No step in BF16 can take less time. The operands are random; layers of the same shape use the same operands. tokens:
    the number of rows of x and dy.
    """

    def __init__(self, config: DecoderConfig, tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        layers = [module for module in on_meta(config).modules() if isinstance(module, Linear)]
        self.shapes = [(layer.out_features, layer.in_features) for layer in layers]
        generator = torch.Generator().manual_seed(0)

        def operand(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator).to(device, torch.bfloat16)

        self.operands = {
            (out, width): (operand(tokens, width), operand(out, width), operand(tokens, out))
            for out, width in dict.fromkeys(self.shapes)
        }

    def __call__(self) -> None:
        for shape in self.shapes:
            x, w, dy = self.operands[shape]
            matmul(x, w.t())
            matmul(dy, w)
            matmul(dy.t(), x)


class Step:
    """A model that is trained with a recipe or in plain BF16, always on the same batch; each call runs one step."""

    def __init__(self, config: DecoderConfig, recipe: Recipe | None, optimizer: str, batch: Tensor) -> None:
        """Build the model. recipe: None for plain BF16. optimizer: its kind. batch: [sequences, length + 1]."""
        self.model = build(config, seed=0, device=batch.device)
        self.quantization: Quantization | None = None if recipe is None else quantize(self.model, recipe)
        settings = OptimizerConfig(kind=optimizer)
        self.optimizer = make_optimizer(self.model, settings, partition=partition_of(self.model, optimizer))
        self.inputs, self.targets = batch[:, :-1], batch[:, 1:]
        self.number = 0

    def __call__(self) -> None:
        quantization = self.quantization
        if quantization is not None:
            quantization.begin(self.number)
        loss = self.model.loss(self.inputs, self.targets)
        if quantization is not None and (penalty := quantization.penalty()) is not None:
            loss = loss + penalty
        loss.backward()
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.number += 1

    def memory(self) -> int:
        """Run one step; return the peak number of bytes of all tensors, including parameters and optimizer states."""
        tracker = MemTracker()
        tracker.track_external(self.model, self.optimizer)
        with tracker:
            self()
        peak: dict[str, int] = tracker.get_tracker_snapshot("peak")[self.inputs.device]
        return peak["Total"]
