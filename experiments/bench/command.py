"""Measure what recipes cost in training (`fewbits bench train`): tokens/s relative to plain BF16 in the same run.

Every variant trains its own copy of the model. The variants take turns, one step each, so that other load on the
machine affects all of them alike. A ratio is the median over turns of (plain step time / variant's step time). A step
is forward, backward, clipping and optimizer, on the batch and threads that a trial of that model has. `--store` writes
every step time and a description of the machine into the store, from where a study's report reads them.
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

Columns: ms per step; tokens/s; share: tokens/s divided by those of plain BF16; memory: MiB of tensors at a step's peak,
parameters and optimizer included; observed: tokens/s with the observer divided by those without it; eager: tokens/s
divided by those of plain BF16 when the same quantizers run as plain torch operators (the reference)."""

RECIPES = ("mor/block", "nvfp4", "gaussws")
PLAIN = "bf16"
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """The results of one variant: a recipe under an optimizer."""

    variant: str
    optimizer: str
    milliseconds: float
    tokens_per_second: float
    share: float
    memory: int  # bytes
    seconds: list[float]  # one for each turn
    observed: float | None = None
    eager: float | None = None


@dataclass(frozen=True)
class ModelResult:
    """The results of all variants of one model, measured in one run."""

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
    if options.once and (file := _file(options, world.device)).exists():
        print(f"{file} exists, nothing was measured; delete it to measure again")
        return 0
    if warning := busy(os.getloadavg()[0], os.cpu_count() or 1):
        print(f"fewbits: {warning}", file=sys.stderr)
    configs = [model_named(name) for name in options.model.split(",")]
    recipes = {name: load_recipe(name) for name in options.recipes.split(",")}
    results: list[ModelResult] = []
    for config in configs:
        print(f"fewbits: timing {config.name} in {options.steps} turns", file=sys.stderr, flush=True)
        results.append(_measure(config, recipes, world.device, options))
    device_text = _describe_device(world.device, options.threads)
    if options.store is not None:
        _save(results, world.device, device_text, options)
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return 0
    for result in results:
        print(_text(result, device_text))
    return 0


def _text(result: ModelResult, device_text: str) -> str:
    several = len({row.optimizer for row in result.rows}) > 1
    width = max(14, *(len(_label(row, several)) + 2 for row in result.rows))
    header = f"{'ms':>9}{'tokens/s':>11}{'share':>8}{'memory':>9}{'observed':>10}{'eager':>8}"
    lines = [f"{result}, {device_text}", "", " " * width + header]
    for row in result.rows:
        optional = [f"{value:.3f}" if value is not None else "-" for value in (row.observed, row.eager)]
        lines.append(
            f"{_label(row, several):{width}}{row.milliseconds:9.1f}{row.tokens_per_second:11,.0f}{row.share:8.3f}"
            f"{row.memory / MIB:9.1f}{optional[0]:>10}{optional[1]:>8}"
        )
    return "\n".join(lines)


def _label(row: Row, several: bool) -> str:
    return f"{row.variant}, {row.optimizer}" if several else row.variant


def _save(results: list[ModelResult], device: Any, device_text: str, options: argparse.Namespace) -> None:
    """Write the results into the store, in one file for each kind of device that holds the latest measurement."""
    from fewbits.common.atomic import write_json
    from fewbits.experiments.identity import machine
    from fewbits.kernels.backends.processor import processor_name

    file = _file(options, device)
    file.parent.mkdir(parents=True, exist_ok=True)
    measured_on = {**machine(), "processor": processor_name(), "device": device_text}
    measured_on |= {"load": os.getloadavg()[0], "time": time.time()}
    write_json(
        file,
        {"machine": measured_on, "turns": options.steps, "models": [asdict(result) for result in results]},
    )


def _file(options: argparse.Namespace, device: Any) -> Path:
    store: Path = options.store
    return store / "bench" / f"train-{device.type}.json"


def _measure(config: Any, recipes: dict[str, Any], device: Any, options: argparse.Namespace) -> ModelResult:
    """Time plain BF16 and each recipe, with and without the observer, in turns; eager emulation takes fewer turns."""
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
        for row in _compare(config, recipes, optimizer, tokens.to(device), options)
    ]
    sizes = (config.layers, parameters(config), linear_parameters(config), options.batch, options.length)
    return ModelResult(config.name, *sizes, rows)


def _compare(
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


def _describe_device(device: Any, threads: int) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {threads} thread{'s' if threads > 1 else ''}"


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("fewbits bench train", __doc__, EXAMPLES)
    parser.add_argument("--model", default="nemotron-nano", help="names, separated by commas (default: nemotron-nano)")
    parser.add_argument("--layers", type=_count, help="number of blocks, for a model that is too large as a whole")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="names, separated by commas")
    parser.add_argument("--optimizers", default="adamw", help="adamw, adam-mini, or both, separated by a comma")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=_count, default=1, help="threads on a CPU")
    parser.add_argument("--batch", type=_count, default=8, help="sequences in a batch")
    parser.add_argument("--length", type=_count, default=256, help="tokens in a sequence")
    parser.add_argument("--steps", type=_count, default=20, help="turns that are timed")
    parser.add_argument("--eager", type=int, default=2, metavar="TURNS", help="turns of eager emulation (0: skip it)")
    parser.add_argument("--no-observer", action="store_true", help="skip the turns with the observer")
    parser.add_argument("--store", metavar="RUNS", help="write all results to RUNS/bench, for reports")
    parser.add_argument("--once", action="store_true", help="skip if RUNS/bench has results for this kind of device")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    options.store = options.store and store_folder(options.store)
    if options.once and options.store is None:
        raise ValueError("bench train: --once needs --store")
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of 1 or more is expected")
    return int(text)
