"""`fewbits bench train`: what a recipe costs in training, as tokens/s beside plain BF16 in the same run.

Every variant trains its own copy of the model. They take turns, one step each, so that whatever else the machine does
falls on all alike; a ratio is the median over turns of (plain step time / variant's step time). A step is forward,
backward, clipping and optimizer, on the batch and threads that a trial of that model has. `--store` leaves all that was
measured, every single time and the machine, beside the trials, where a study's report finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fewbits.common import terminal
from fewbits.common.arguments import CommandParser
from fewbits.common.store_folder import store_folder

EXAMPLES = """\
examples:
  fewbits bench train
  fewbits bench train --model llama2-nano --recipes gaussws,diffq --steps 20
  fewbits bench train --device cuda --model gpt2-124m --batch 12 --length 1024
  fewbits bench train --model gpt2-nano,llama2-nano --recipes gaussws,diffq --optimizers adamw,adam-mini --store runs

Columns: ms a step; tokens/s; share, tokens/s over plain BF16's; memory, MiB of tensors at a step's peak, parameters and
optimizer included; observed, tokens/s with the observer on over those without; eager, tokens/s over plain BF16's when
the same quantizers run as plain torch operators (the reference)."""

RECIPES = ("mor/block", "nvfp4", "gaussws")
PLAIN = "bf16"
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """A variant: a recipe under an optimizer."""

    variant: str
    optimizer: str
    milliseconds: float
    tokens_per_second: float
    share: float
    memory: int  # bytes
    seconds: list[float]  # of each turn
    observed: float | None = None
    eager: float | None = None


@dataclass(frozen=True)
class Measured:
    """All variants of one model, measured in one run."""

    model: str
    layers: int
    parameters: int
    linear_parameters: int
    batch: int
    length: int
    rows: list[Row]

    def __str__(self) -> str:
        tokens = f"{self.batch} x {self.length} tokens a step"
        return f"{self.model}, {self.layers} blocks, {self.parameters:,} parameters, {tokens}"


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    from fewbits.experiments.config import load_recipe
    from fewbits.experiments.devices import choose
    from fewbits.experiments.trial import Runtime
    from fewbits.kernels.backends import cuda
    from fewbits.kernels.bench.measure import busy
    from fewbits.models.networks.registry import model as model_named

    world = choose(Runtime(device=options.device, threads=options.threads))
    if world.device.type == "cuda" and (missing := cuda.complaint()):
        raise ValueError(f"bench train: --device cuda: {missing}")
    if options.once and (there := _file(options, world.device)).exists():
        print(f"{there} is there: nothing is measured again (delete it to do so)")
        return 0
    if warning := busy(os.getloadavg()[0], os.cpu_count() or 1):
        print(f"fewbits: {warning}", file=sys.stderr)
    configs = [model_named(name) for name in options.model.split(",")]
    recipes = {name: load_recipe(name) for name in options.recipes.split(",")}
    found: list[Measured] = []
    for config in configs:
        print(f"fewbits: timing {config.name} in {options.steps} turns", file=sys.stderr, flush=True)
        found.append(_measured(config, recipes, world.device, options))
    where = _where(world.device, options.threads)
    if options.store is not None:
        _save(found, world.device, where, options)
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return 0
    for one in found:
        print(_text(one, where))
    return 0


def _text(one: Measured, where: str) -> str:
    several = len({row.optimizer for row in one.rows}) > 1
    width = max(14, *(len(_called(row, several)) + 2 for row in one.rows))
    heads = f"{'ms':>9}{'tokens/s':>11}{'share':>8}{'memory':>9}{'observed':>10}{'eager':>8}"
    lines = [f"{one}, {where}", "", " " * width + heads]
    for row in one.rows:
        optional = [f"{value:.3f}" if value is not None else "-" for value in (row.observed, row.eager)]
        lines.append(
            f"{_called(row, several):{width}}{row.milliseconds:9.1f}{row.tokens_per_second:11,.0f}{row.share:8.3f}"
            f"{row.memory / MIB:9.1f}{optional[0]:>10}{optional[1]:>8}"
        )
    return "\n".join(lines)


def _called(row: Row, several: bool) -> str:
    return f"{row.variant}, {row.optimizer}" if several else row.variant


def _save(found: list[Measured], device: Any, where: str, options: argparse.Namespace) -> None:
    """One file for each kind of device: what was measured last."""
    from fewbits.common.atomic import write_json
    from fewbits.experiments.identity import machine
    from fewbits.kernels.backends.processor import processor_name

    file = _file(options, device)
    file.parent.mkdir(parents=True, exist_ok=True)
    measured_on = {**machine(), "processor": processor_name(), "device": where}
    measured_on |= {"load": os.getloadavg()[0], "time": time.time()}
    write_json(
        file,
        {"machine": measured_on, "turns": options.steps, "models": [asdict(one) for one in found]},
    )


def _file(options: argparse.Namespace, device: Any) -> Path:
    store: Path = options.store
    return store / "bench" / f"train-{device.type}.json"


def _measured(config: Any, recipes: dict[str, Any], device: Any, options: argparse.Namespace) -> Measured:
    """Plain BF16 and every recipe, each also with the observer, in turns; eager emulation in shorter ones."""
    import torch

    from fewbits.models.networks.registry import linear_parameters, parameters

    if options.layers:
        config = replace(config, layers=options.layers, pattern=config.pattern[: options.layers])
    tokens = torch.randint(
        0, config.vocab, (options.batch, options.length + 1), generator=torch.Generator().manual_seed(0)
    )
    rows = [
        row
        for optimizer in options.optimizers.split(",")
        for row in _compared(config, recipes, optimizer, tokens.to(device), options)
    ]
    sizes = (config.layers, parameters(config), linear_parameters(config), options.batch, options.length)
    return Measured(config.name, *sizes, rows)


def _compared(
    config: Any, recipes: dict[str, Any], optimizer: str, batch: Any, options: argparse.Namespace
) -> list[Row]:
    from fewbits.experiments.bench.step import Step

    steps = {PLAIN: Step.of(config, None, optimizer, batch)}
    for name, recipe in recipes.items():
        steps[name] = Step.of(config, recipe, optimizer, batch)
        if not options.no_observer:
            steps[f"{name} observed"] = Step.of(config, recipe, optimizer, batch, observed=True)
    times = _in_turns(steps, options.steps, batch.device)
    eager = {}
    if options.eager:
        with _reference():
            slow = _in_turns({name: steps[name] for name in recipes}, options.eager, batch.device)
        eager = {name: _ratio(times[PLAIN], slow[name]) for name in recipes}
    count = options.batch * options.length
    rows = []
    for name in (PLAIN, *recipes):
        median = statistics.median(times[name])
        observed = times.get(f"{name} observed")
        rows.append(
            Row(
                variant=name,
                optimizer=optimizer,
                milliseconds=1e3 * median,
                tokens_per_second=count / median,
                share=_ratio(times[PLAIN], times[name]),
                memory=steps[name].memory(),
                seconds=times[name],
                observed=_ratio(times[name], observed) if observed else None,
                eager=eager.get(name),
            )
        )
    return rows


def _in_turns(steps: Mapping[str, Callable[[], None]], turns: int, device: Any) -> dict[str, list[float]]:
    import torch

    def timed(step: Callable[[], None]) -> float:
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 2):
        for name, step in steps.items():
            seconds = timed(step)
            if turn >= 2:
                times[name].append(seconds)
        terminal.show(f"turn {turn + 1} of {turns + 2}")
    terminal.clear()
    return times


def _ratio(plain: list[float], other: list[float]) -> float:
    if len(plain) == len(other):
        return statistics.median(p / o for p, o in zip(plain, other, strict=True))
    return statistics.median(plain) / statistics.median(other)


@contextmanager
def _reference() -> Iterator[None]:
    before = os.environ.get("FEWBITS_BACKEND")
    os.environ["FEWBITS_BACKEND"] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ["FEWBITS_BACKEND"]
        else:
            os.environ["FEWBITS_BACKEND"] = before


def _where(device: Any, threads: int) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {threads} thread{'s' if threads > 1 else ''}"


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("fewbits bench train", __doc__, EXAMPLES)
    parser.add_argument(
        "--model", default="nemotron-nano", help="by name, separated by commas; nemotron-nano if not given"
    )
    parser.add_argument("--layers", type=_count, help="blocks, where the whole model is too large")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="by name, separated by commas")
    parser.add_argument("--optimizers", default="adamw", help="adamw, adam-mini, or both, separated by a comma")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=_count, default=1, help="on a CPU")
    parser.add_argument("--batch", type=_count, default=8, help="sequences")
    parser.add_argument("--length", type=_count, default=256, help="tokens of a sequence")
    parser.add_argument("--steps", type=_count, default=20, help="turns that are timed")
    parser.add_argument("--eager", type=int, default=2, metavar="TURNS", help="turns of eager emulation; 0: none")
    parser.add_argument("--no-observer", action="store_true", help="leave out the turns with the observer")
    parser.add_argument("--store", metavar="RUNS", help="leave it all in RUNS/bench, for reports")
    parser.add_argument("--once", action="store_true", help="not again where RUNS/bench has it of this kind of device")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    options.store = options.store and store_folder(options.store)
    if options.once and options.store is None:
        raise ValueError("bench train: --once belongs to --store")
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 up")
    return int(text)
