"""Measure what recipes cost in training (`fewbits bench train`): tokens/s relative to plain BF16.

A step is a forward and a backward pass, gradient clipping and the optimizer's update. Plain BF16 and the recipes take
turns in one process, one step each. The matrix products of all linear layers are timed in the same turns, without the
rest of a step: no step in BF16 can be faster than they are. `--against` compares step times with another commit.
`--store` writes the time of every step and a description of the machine into the store, for a study's report.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from fewbits.common.arguments import CommandParser, not_negative, positive
from fewbits.common.tables import print_table
from fewbits.common.wording import plural
from fewbits.experiments.bench import results

if TYPE_CHECKING:
    from fewbits.experiments.bench.train import ModelResult

EXAMPLES = """\
examples:
  fewbits bench train
  fewbits bench train --model llama2-nano --recipes gaussws,diffq --steps 20
  fewbits bench train --device cuda --model gpt2-124m --batch 12 --length 1024
  fewbits bench train --against HEAD~1 --recipes nvfp4
  fewbits bench train --model gpt2-nano,llama2-nano --recipes gaussws,diffq --optimizers adamw,adam-mini --store runs

Columns: ms per step; products: ms divided by the ms of all linear layers' products in BF16; tokens/s; share: tokens/s
divided by the tokens/s of plain BF16; memory: MiB of tensors at a step's peak, parameters and optimizer included;
observed: tokens/s with the observer divided by tokens/s without it; eager: the share if the same quantizers run as
plain torch operators (the reference backend).

Columns with --against: faster: ms of the other commit divided by ms, the median over the rounds; range: its lowest and
highest value; rest: only for plain BF16, (ms − products) / (the other commit's ms − products), the median over the
rounds, where products are those of the linear layers, timed in this checkout: less than 1 is faster."""
RECIPES = "mor/block,nvfp4,gaussws"
COLUMNS = ("recipe", "ms", "products", "tokens/s", "share", "memory", "observed", "eager")


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    if options.against is not None:
        return _compare_commits(options)
    from fewbits.experiments.bench.train import Settings, first_layers, measure
    from fewbits.experiments.config import load_recipe
    from fewbits.experiments.devices import choose
    from fewbits.experiments.trial import Runtime
    from fewbits.kernels.backends.gpu import cuda
    from fewbits.kernels.bench.measure import warn_if_busy
    from fewbits.kernels.bench.results import machine
    from fewbits.models.networks.registry import model

    device = choose(Runtime(device=options.device, threads=options.threads)).device
    if device.type == "cuda" and (complaint := cuda.complaint()):
        raise ValueError(f"bench train: --device cuda: {complaint}")
    if results.is_measured(options, f"train-{device.type}"):
        return 0
    warn_if_busy()
    configs = [first_layers(model(name), options.layers) for name in options.model.split(",")]
    recipes = {name: load_recipe(name) for name in options.recipes.split(",")}
    settings = Settings(options.batch, options.length, options.steps, options.eager, not options.no_observer)
    facts = machine(device.type)
    measured = []
    for config in configs:
        print(f"fewbits: timing {config.name}, {options.steps} steps of each recipe", file=sys.stderr, flush=True)
        measured.append(measure(config, recipes, options.optimizers.split(","), device, settings))
    as_data = [asdict(result) for result in measured]
    results.save(options.store, f"train-{device.type}", facts, {"turns": options.steps, "models": as_data})
    if options.json:
        print(json.dumps(as_data, indent=2))
        return 0
    for result in measured:
        _show(result, str(facts["device"]))
    return 0


def _show(result: ModelResult, device: str) -> None:
    several = len({row.optimizer for row in result.rows}) > 1
    tokens = f"{result.batch} x {result.length} tokens a step"
    print(f"{result.model}, {result.layers} blocks, {result.parameters:,} parameters, {tokens}, {device}")
    print(f"the products of all linear layers in BF16: {result.gemm_milliseconds:.1f} ms a step\n")
    rows = [
        (
            f"{row.variant}, {row.optimizer}" if several else row.variant,
            f"{row.milliseconds:.1f}",
            f"{row.milliseconds / result.gemm_milliseconds:.2f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.share:.3f}",
            f"{row.memory / 2**20:.1f}",
            *("-" if value is None else f"{value:.3f}" for value in (row.observed, row.eager)),
        )
        for row in result.rows
    ]
    print_table(COLUMNS, rows, right=COLUMNS[1:])


def _compare_commits(options: argparse.Namespace) -> int:
    from fewbits.experiments.bench.against import compare
    from fewbits.kernels.backends.processor import processor_name
    from fewbits.kernels.bench.measure import warn_if_busy

    passed_on = ("model", "layers", "recipes", "optimizers", "device", "threads", "batch", "length", "steps")
    given = {name: value for name in passed_on if (value := getattr(options, name)) is not None}
    both = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    warn_if_busy()
    changes = compare(options.against, [*both, "--eager", "0", "--no-observer"], options.rounds)
    if options.json:
        print(json.dumps([asdict(change) for change in changes], indent=2))
        return 0
    rows = [
        (
            *(change.model, change.variant, change.optimizer),
            *(f"{change.milliseconds:.1f}", f"{change.other_milliseconds:.1f}"),
            *(f"{change.speed.median:.2f}", f"{change.speed.low:.2f} to {change.speed.high:.2f}"),
            "-" if change.rest is None else f"{change.rest.median:.2f}",
        )
        for change in changes
    ]
    print(f"{processor_name()}, {plural(options.rounds, 'round')} of {plural(options.steps, 'step')}\n")
    print_table(("model", "recipe", "optimizer", "ms", f"ms of {options.against}", "faster", "range", "rest"), rows)
    print("\nrest: time of a step in BF16 minus the products of the linear layers, divided by the other commit's")
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("fewbits bench train", __doc__, EXAMPLES)
    parser.add_argument("--model", default="nemotron-nano", help="models, separated by commas (default: nemotron-nano)")
    parser.add_argument("--layers", type=positive, help="time only this number of blocks, if a model is too large")
    parser.add_argument("--recipes", default=RECIPES, help="recipes, separated by commas (default: %(default)s)")
    parser.add_argument("--optimizers", default="adamw", help="adamw, adam-mini, or both, separated by a comma")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: %(default)s")
    parser.add_argument("--threads", type=positive, default=1, help="threads on a CPU (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=8, help="sequences in a batch (default: %(default)s)")
    parser.add_argument("--length", type=positive, default=256, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="timed steps of each recipe (default: %(default)s)")
    parser.add_argument(
        "--eager",
        type=not_negative,
        default=2,
        metavar="TURNS",
        help="steps to time on the reference backend (0: none)",
    )
    parser.add_argument("--against", metavar="COMMIT", help="compare the step times with another commit's")
    parser.add_argument("--rounds", type=positive, help="how often --against measures both commits (default: 5)")
    parser.add_argument("--no-observer", action="store_true", help="omit the steps with the observer (column observed)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    results.add_options(parser)
    options = parser.parse_args(argv)
    results.check_options(options, "bench train")
    if options.rounds and options.against is None:
        raise ValueError("bench train: --rounds requires --against COMMIT, the commit to compare with")
    options.rounds = options.rounds or 5
    if options.against is not None and options.store is not None:
        raise ValueError(
            "bench train: --store cannot be combined with --against, which stores no results: use only one of the two"
        )
    return options
