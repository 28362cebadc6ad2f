"""Compare recipes at a checkpoint of a run, on the same batches (`fewbits probe`)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fewbits.common import terminal
from fewbits.common.arguments import CommandParser, positive
from fewbits.common.terminal import print_json, print_table

if TYPE_CHECKING:
    from fewbits.experiments.probes.errors import Probe
    from fewbits.models.recipe import Recipe

EXAMPLES = """\
examples:
  fewbits probe nemotron-nano-bf16-python-s0-1a2b3c4d bf16 mor/block nvfp4
  fewbits probe 1a2b3c4d bf16 nvfp4 --accumulators hopper-fp8,hopper-fp8-promoted
  fewbits probe runs/gpt2-nano-bf16-python-s0-5e6f7a8b --step 500 nvfp4 nvfp4 rht=null stochastic=[] --seeds 8 --layers

A recipe is a name from `fewbits list recipes`; KEY=VALUE after it changes a setting of this recipe. All measures
compare the model quantized by the recipe with the same model unquantized, at the same weights and batches:

  loss increase  in nats per token, ± the standard error over batches
  cosine         of the angle between the two gradients of the loss, over all parameters; 1: the same direction
  error %        norm of the difference of the two gradients, in percent of the unquantized one's norm
  bias %         how much longer (+) or shorter (-) the quantized gradient is along the unquantized one
  noise %        the part of the error that changes with the seed: 0 without random numbers, – with one seed
  worst layer    the layer whose weight's gradient has the largest error, with this error
  ACCUMULATOR %  with --accumulators: the relative error of forward products if this accumulator computed their sums,
                 compared with exact sums of the same operands; for example hopper-fp8"""
UNKNOWN = "–"
_NUMBERS = ("cosine", "error %", "bias %", "noise %")


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)

    from fewbits.experiments.probes.probe import probe
    from fewbits.experiments.storage.run_folder import expanded, find_run
    from fewbits.experiments.trial import Runtime

    path = expanded(options.run)
    terminal.show("loading the checkpoint and the batches")
    try:
        result = probe(
            path if path.is_dir() else find_run(options.run, options.runs),
            _recipes(options.recipes),
            batches=options.batches,
            seeds=options.seeds,
            step=options.step,
            accumulators=options.accumulators.split(",") if options.accumulators else (),
            runtime=Runtime(device=options.device, threads=options.threads, cache=options.cache),
            report=lambda done, total: terminal.show(f"{done}/{total} batches"),
        )
    finally:
        terminal.clear()
    if options.json:
        print_json(_plain(result))
    else:
        _print_summary(result)
        if options.layers:
            _print_layers(result)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("fewbits probe", __doc__, EXAMPLES)
    parser.add_argument("run", help="a run: its folder, or its name or hash in --runs; or a checkpoint's folder")
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="a recipe, then KEY=VALUE to change its settings")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--batches", type=positive, default=4, help="number of micro-batches (default: %(default)s)")
    parser.add_argument("--seeds", type=positive, default=1, help="seeds of recipes that draw noise (default: 1)")
    sums = "names, separated by commas: add a column with the error of each accumulator's sums"
    parser.add_argument("--accumulators", metavar="NAMES", help=sums)
    parser.add_argument("--layers", action="store_true", help="also print a row for each layer")
    parser.add_argument("--json", action="store_true", help="print the summary and the layers as JSON")
    parser.add_store()
    parser.add_device()
    parser.add_cache()
    return parser


def _recipes(arguments: Sequence[str]) -> list[Recipe]:
    """Return the recipes of arguments NAME [KEY=VALUE …] NAME …; the changes become part of the recipe's name."""
    from fewbits.experiments.config import recipe_from_overrides

    grouped: list[list[str]] = []
    for argument in arguments:
        if "=" not in argument:
            grouped.append([argument])
        elif grouped:
            grouped[-1].append(argument)
        else:
            raise ValueError(f"{argument} comes before any recipe: name the recipe first, then its settings")
    recipes = ((" ".join(words), recipe_from_overrides(words[0], words[1:])) for words in grouped)
    return [replace(recipe, name=name) for name, recipe in recipes]


# ------------------------------------------------------------------------------------------------ output


def _plain(result: Probe) -> dict[str, Any]:
    named = ("run", "step", "split", "batches", "sequences", "length", "dtype", "reference")
    facts: dict[str, Any] = {name: getattr(result, name) for name in named}
    return facts | {"recipes": result.summary().to_dict("records"), "layers": result.layers().to_dict("records")}


def _print_summary(result: Probe) -> None:
    batches = f"{result.split}, {result.batches} × {result.sequences}x{result.length} tokens"
    print(f"{result.run} at step {result.step}: {batches}, compared with unquantized {result.reference}\n")
    rows = []
    for row in result.summary().to_dict("records"):
        worst = f"{_percent(row['worst_error'])} {row['worst_layer']}" if row["worst_error"] > 0 else UNKNOWN
        increase = f"{row['increase']:+.6f}" + _plus_minus(row["increase_se"], 6)
        gradient = _gradient_cells(row, _plus_minus(100 * row["bias_se"], 3))
        rows.append((str(row["recipe"]), increase, *gradient, worst, *_sum_cells(result, row)))
    sums = [f"{name} %" for name in result.accumulators]
    right = ("loss increase", *_NUMBERS, *sums)
    print_table(("recipe", "loss increase", *_NUMBERS, "worst layer", *sums), rows, right=right)


def _print_layers(result: Probe) -> None:
    from fewbits.models.recipe import SLOTS

    print(
        "\nby layer: the weight's gradient, compared with the unquantized one; each operand's relative error in percent"
    )
    rows = []
    for row in result.layers().to_dict("records"):
        slots = (_percent(row.get(slot, math.nan)) for slot in SLOTS)
        rows.append((str(row["recipe"]), str(row["layer"]), *_gradient_cells(row), *slots, *_sum_cells(result, row)))
    numbers = (*_NUMBERS, *SLOTS, *(f"{name} %" for name in result.accumulators))
    print_table(("recipe", "layer", *numbers), rows, right=numbers)


def _gradient_cells(row: dict[Any, Any], bias_error: str = "") -> tuple[str, ...]:
    bias = f"{100 * row['bias']:+.3f}{bias_error}"
    return f"{row['cosine']:.6f}", _percent(row["error"]), bias, _percent(row["noise"])


def _sum_cells(result: Probe, row: dict[Any, Any]) -> tuple[str, ...]:
    from fewbits.experiments.probes.errors import SUMS

    return tuple(_percent(row.get(f"{SUMS}{name}", math.nan)) for name in result.accumulators)


def _percent(share: float) -> str:
    return UNKNOWN if math.isnan(share) else f"{100 * share:.3f}"


def _plus_minus(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f" ± {value:.{digits}f}"
