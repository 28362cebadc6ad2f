"""`fewbits bench train`: what a recipe costs in training, as tokens/s beside plain BF16 in the same run.

Every variant trains its own copy of the model. They take turns, one step each, so that whatever else the machine does
falls on all alike; a ratio is the median over turns of (plain step time / variant's step time). A step is forward,
backward, clipping and optimizer, on the batch and threads that a trial of that model has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

EXAMPLES = """\
examples:
  fewbits bench train
  fewbits bench train --model llama2-nano --recipes gaussws,diffq --steps 20
  fewbits bench train --device cuda --model gpt2-124m --batch 12 --length 1024

Columns: ms a step; tokens/s; share, tokens/s over plain BF16's; observed, tokens/s with the observer on over those
without; eager, tokens/s over plain BF16's when the same quantizers run as plain torch operators (the reference)."""

RECIPES = ("mor/block", "nvfp4", "gaussws")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"bench train: {message}")


@dataclass(frozen=True)
class Row:
    variant: str
    milliseconds: float
    tokens_per_second: float
    share: float
    observed: float | None = None
    eager: float | None = None


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    from fewbits.experiments.config import load_recipe
    from fewbits.experiments.devices import choose
    from fewbits.experiments.trial import Runtime
    from fewbits.models.registry import model as model_named
    from fewbits.models.registry import parameters

    world = choose(Runtime(device=options.device, threads=options.threads))
    config = model_named(options.model)
    if options.layers:
        config = replace(config, layers=options.layers, pattern=config.pattern[: options.layers])
    recipes = {name: load_recipe(name) for name in options.recipes.split(",")}
    rows = compare(config, recipes, world.device, options)
    tokens = f"{options.batch} x {options.length} tokens a step"
    size = f"{config.layers} blocks, {parameters(config):,} parameters, {tokens}"
    heading = f"{config.name}, {size}, {_where(world.device, options.threads)}"
    if options.json:
        print(json.dumps({"what": heading, "rows": [vars(row) for row in rows]}, indent=2))
        return 0
    print(f"{heading}\n\n{'':14}{'ms':>9}{'tokens/s':>11}{'share':>8}{'observed':>10}{'eager':>8}")
    for row in rows:
        optional = [f"{value:.3f}" if value is not None else "-" for value in (row.observed, row.eager)]
        print(
            f"{row.variant:14}{row.milliseconds:9.1f}{row.tokens_per_second:11,.0f}{row.share:8.3f}"
            f"{optional[0]:>10}{optional[1]:>8}"
        )
    return 0


def compare(config: Any, recipes: dict[str, Any], device: Any, options: argparse.Namespace) -> list[Row]:
    """Plain BF16 and every recipe, each also with the observer, in turns; eager emulation in shorter ones."""
    import torch

    tokens = torch.randint(
        0, config.vocab, (options.batch, options.length + 1), generator=torch.Generator().manual_seed(0)
    )
    batch = tokens.to(device)
    steps = {"bf16": _step(config, None, batch)}
    for name, recipe in recipes.items():
        steps[name] = _step(config, recipe, batch)
        if not options.no_observer:
            steps[f"{name} observed"] = _step(config, recipe, batch, observed=True)
    times = _in_turns(steps, options.steps, device)
    eager = {}
    if options.eager:
        with _reference():
            slow = _in_turns({f"{name}": steps[name] for name in recipes}, options.eager, device)
        eager = {name: _ratio(times["bf16"], slow[name]) for name in recipes}
    count = options.batch * options.length
    rows = []
    for name in ("bf16", *recipes):
        median = statistics.median(times[name])
        observed = times.get(f"{name} observed")
        rows.append(
            Row(
                name,
                1e3 * median,
                count / median,
                _ratio(times["bf16"], times[name]),
                _ratio(times[name], observed) if observed else None,
                eager.get(name),
            )
        )
    return rows


def _step(config: Any, recipe: Any, batch: Any, *, observed: bool = False) -> Callable[[], None]:
    from fewbits.experiments.optimizers import OptimizerConfig, clip_gradients, make_optimizer
    from fewbits.models.observer import Observer, ObserverConfig
    from fewbits.models.quantize import quantize
    from fewbits.models.registry import build

    model = build(config, seed=0, device=batch.device)
    quantization = None
    if recipe is not None:
        observer = Observer(ObserverConfig()) if observed else None
        quantization = quantize(model, recipe, observer=observer)
    optimizer = make_optimizer(model, OptimizerConfig())
    inputs, targets = batch[:, :-1], batch[:, 1:]
    number = 0

    def step() -> None:
        nonlocal number
        if quantization is not None:
            quantization.begin(number)
        loss = model.loss(inputs, targets)
        if quantization is not None and (penalty := quantization.penalty()) is not None:
            loss = loss + penalty
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        if quantization is not None and quantization.observer is not None and quantization.observer.due(number):
            quantization.observer.rows(number, quantization.layers)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        number += 1

    return step


def _in_turns(steps: dict[str, Callable[[], None]], turns: int, device: Any) -> dict[str, list[float]]:
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
        if sys.stderr.isatty():
            print(f"\r\033[Kturn {turn + 1} of {turns + 2}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
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
    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, width=110)

    parser = _Parser("fewbits bench train", description=__doc__, epilog=EXAMPLES, formatter_class=formatter)
    parser.add_argument("--model", default="nemotron-nano", help="by name; nemotron-nano if not given")
    parser.add_argument("--layers", type=_count, help="blocks, where the whole model is too large")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="by name, separated by commas")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=_count, default=1, help="on a CPU")
    parser.add_argument("--batch", type=_count, default=8, help="sequences")
    parser.add_argument("--length", type=_count, default=256, help="tokens of a sequence")
    parser.add_argument("--steps", type=_count, default=20, help="turns that are timed")
    parser.add_argument("--eager", type=int, default=2, metavar="TURNS", help="turns of eager emulation; 0: none")
    parser.add_argument("--no-observer", action="store_true", help="leave out the turns with the observer")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 up")
    return int(text)
