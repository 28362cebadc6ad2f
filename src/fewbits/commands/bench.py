"""Measure the kernels, noise generators and training steps (`fewbits bench kernels`, `fewbits bench train`).

`--store` writes the times and a description of the machine into the store, for a study's report.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.common.arguments import CommandParser, positive
from fewbits.common.atomic import write_json
from fewbits.common.store_folder import BENCH, store_folder
from fewbits.common.terminal import notice, print_table

if TYPE_CHECKING:
    from fewbits.experiments.bench.train import ModelResult

KERNELS = """\
examples:
  fewbits bench kernels --size 4096 --only nvfp4 --json nvfp4.json
  fewbits bench kernels --generators --shapes 2048x512,16384x16384    the noise generators of GaussWS
  fewbits bench kernels --generators --device cuda --store runs
"""
TRAIN = """\
examples:
  fewbits bench train
  fewbits bench train --model llama2-nano --recipes gaussws,diffq --steps 20
  fewbits bench train --device cuda --model gpt2-124m --batch 12 --length 1024
  fewbits bench train --model gpt2-nano,llama2-nano --recipes gaussws,diffq --optimizers adamw,adam-mini --store runs

A step is a forward and a backward pass, gradient clipping and the optimizer's update. Plain BF16 and the recipes take
turns in one process, one step each.

Columns: ms per step; products: ms divided by the ms of all linear layers' products in BF16; tokens/s; share: tokens/s
divided by the tokens/s of plain BF16; memory: MiB of tensors at a step's peak, parameters and optimizer included."""
COLUMNS = ("recipe", "ms", "products", "tokens/s", "share", "memory")
SQUARE = 32  # side of the square blocks that share a bit width; sides of matrices have to be multiples of it


def kernels(argv: Sequence[str]) -> int:
    about = "Time the kernels, a copy of the same tensor and other implementations, in one run."
    parser = CommandParser("fewbits bench kernels", about, KERNELS)
    parser.add_argument("--size", type=positive, default=8192, metavar="N", help="rows and columns (default: 8192)")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only the cases whose names contain this text")
    parser.add_argument("--no-peers", action="store_true", help="time only our kernels and the copy: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the time of every timed call to FILE")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=positive, metavar="N", help="number of threads (default: torch's)")
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="runs of each case (default: 5)")
    about = "time noise generators instead: GaussWS's, Box–Muller, torch's"
    parser.add_argument("--generators", action="store_true", help=about)
    shapes = "of --generators: shapes of matrices (default: the weights of Llama 3)"
    parser.add_argument("--shapes", type=_shapes, metavar="RxC,…", help=shapes)
    _add_store_options(parser)
    options = parser.parse_args(argv)
    if options.generators:
        return _generators(options)
    if options.shapes or options.store or options.once:
        parser.error("--shapes, --store and --once are options of --generators")
    _prepare(options)
    if (file := options.json) and ((file.exists() and not file.is_file()) or not file.parent.is_dir()):
        raise ValueError(f"bench kernels: --json {file}: expected a file in an existing folder")
    from fewbits.experiments.bench.kernel_cases import CASES
    from fewbits.experiments.bench.kernels import run, show
    from fewbits.experiments.bench.measure import warn_if_busy

    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        names = ", ".join(case.name for case in CASES)
        raise ValueError(f"bench kernels: --only {options.only!r} is not in the name of a case: {names}")
    warn_if_busy()
    shared = {"dtype": "bfloat16", "device": options.device, "runs": options.runs}
    bench = run(cases, options.size, **shared, peers=not options.no_peers)
    if options.json:
        write_json(options.json.resolve(), asdict(bench))
    show(bench)
    return 0


def _generators(options: argparse.Namespace) -> int:
    name = f"generators-{options.device}"
    if _is_stored(options, name):
        return 0
    _prepare(options)
    from fewbits.experiments.bench.generators import SHAPES, show, time_shapes
    from fewbits.experiments.bench.measure import machine, warn_if_busy

    warn_if_busy()
    facts = machine(options.device)
    timings = time_shapes(options.shapes or SHAPES, options.device, options.runs)
    print(f"{facts['device']}; torch {facts['torch']}; median of {options.runs} runs of each generator")
    show(timings)
    _store(options, name, facts, {"turns": options.runs, "timed": [asdict(timed) for timed in timings]})
    return 0


def _add_store_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="RUNS", help="also write the results into the store RUNS, for reports")
    parser.add_argument("--once", action="store_true", help="do nothing if RUNS has results for this kind of device")


def _is_stored(options: argparse.Namespace, name: str) -> bool:
    """Tell whether `--once` is given and the store has results of the benchmark `name`; if so, say so on stdout."""
    options.store = options.store and store_folder(options.store)
    if not options.once:
        return False
    if options.store is None:
        raise ValueError("bench: --once requires --store RUNS, the store that has the results of earlier calls")
    if exists := (file := _stored_file(options.store, name)).exists():
        print(f"{file} exists, so nothing was measured; delete it to measure again")
    return exists


def _store(options: argparse.Namespace, name: str, machine: dict[str, Any], measured: dict[str, Any]) -> None:
    """Write results of the benchmark `name`, facts about the machine and the time into the store, if one is given."""
    from fewbits.experiments.environment import process_facts

    if options.store is not None:
        file = _stored_file(options.store, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"machine": {**process_facts(), **machine, "time": time.time()}, **measured})


def _stored_file(store: Path, name: str) -> Path:
    return store / BENCH / f"{name}.json"


def _prepare(options: argparse.Namespace) -> None:
    """Set torch's number of threads; raise ValueError if the device is missing."""
    import torch

    from fewbits.kernels.backends.gpu import cuda

    if options.device == "cuda" and (complaint := cuda.complaint()):
        raise ValueError(f"bench kernels: --device cuda: {complaint}; the only valid device on this machine is cpu")
    if options.threads:
        torch.set_num_threads(options.threads)


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse matrix shapes (rows x columns) such as 2048x512,16384x16384."""
    sides = [part.split("x") for part in text.split(",")]
    whole = all(len(pair) == 2 and all(side.isdecimal() for side in pair) for pair in sides)
    if not whole or not all(int(side) and int(side) % SQUARE == 0 for pair in sides for side in pair):
        raise argparse.ArgumentTypeError(f"{text!r}: expected shapes such as 2048x512, sides multiples of {SQUARE}")
    return tuple((int(rows), int(cols)) for rows, cols in sides)


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def train(argv: Sequence[str]) -> int:
    options = _train_options(argv)
    from fewbits.experiments.bench.measure import machine, warn_if_busy
    from fewbits.experiments.bench.train import first_layers, measure
    from fewbits.experiments.config import load_recipe
    from fewbits.experiments.devices import choose
    from fewbits.experiments.trial import Runtime
    from fewbits.kernels.backends.gpu import cuda
    from fewbits.models.networks.registry import model

    device = choose(Runtime(device=options.device, threads=options.threads)).device
    if device.type == "cuda" and (complaint := cuda.complaint()):
        raise ValueError(f"bench train: --device cuda: {complaint}")
    if _is_stored(options, f"train-{device.type}"):
        return 0
    warn_if_busy()
    configs = [first_layers(model(name), options.layers) for name in options.model.split(",")]
    recipes = {name: load_recipe(name) for name in options.recipes.split(",")}
    sizes = {"length": options.length, "steps": options.steps}
    facts, measured = machine(device.type), []
    for config, batch in zip(configs, options.batch, strict=True):
        notice(f"timing {config.name}, {options.steps} steps of each recipe")
        measured.append(measure(config, recipes, options.optimizers.split(","), device, batch=batch, **sizes))
    models = [asdict(result) for result in measured]
    _store(options, f"train-{device.type}", facts, {"turns": options.steps, "models": models})
    for result in measured:
        _show(result, str(facts["device"]))
    return 0


def _show(result: ModelResult, device: str) -> None:
    several = len({row.optimizer for row in result.rows}) > 1
    tokens = f"{result.batch} x {result.length} tokens a step"
    print(f"{result.model}, {result.layers} blocks, {result.parameters:,} parameters, {tokens}, {device}")
    print(f"the products of all linear layers in BF16: {result.gemm_milliseconds:.1f} ms a step\n")
    rows = []
    for row in result.rows:
        name = f"{row.variant}, {row.optimizer}" if several else row.variant
        times = f"{row.milliseconds:.1f}", f"{row.milliseconds / result.gemm_milliseconds:.2f}"
        speeds = f"{row.tokens_per_second:,.0f}", f"{row.share:.3f}"
        rows.append((name, *times, *speeds, f"{row.memory / 2**20:.1f}"))
    print_table(COLUMNS, rows, right=COLUMNS[1:])


def _train_options(argv: Sequence[str]) -> argparse.Namespace:
    about = "Measure what recipes cost in training: tokens/s relative to plain BF16."
    parser = CommandParser("fewbits bench train", about, TRAIN)
    parser.add_argument("--model", default="nemotron-nano", help="models, separated by commas (default: nemotron-nano)")
    parser.add_argument("--layers", type=positive, help="time only this number of blocks, if a model is too large")
    parser.add_argument("--recipes", default="mor/block,nvfp4,gaussws", help="default: %(default)s")
    parser.add_argument("--optimizers", default="adamw", help="adamw, adam-mini, muon, or several, separated by commas")
    parser.add_device()
    about = "sequences in a batch: one number, or one for each model, separated by commas (default: 8)"
    parser.add_argument("--batch", type=_numbers, default=[8], metavar="N,…", help=about)
    parser.add_argument("--length", type=positive, default=256, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=20, help="timed steps of each recipe (default: %(default)s)")
    _add_store_options(parser)
    options = parser.parse_args(argv)
    models = len(options.model.split(","))
    if len(options.batch) not in (1, models):
        raise ValueError(f"bench train: --batch has {len(options.batch)} numbers; expected 1, or {models} as --model")
    options.batch *= models if len(options.batch) == 1 else 1
    return options
