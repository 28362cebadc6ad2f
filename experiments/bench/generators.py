"""Run `fewbits bench kernels --generators`: time noise generators on several matrix shapes, for GaussWS's report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from fewbits.common.arguments import CommandParser
from fewbits.experiments.bench import results
from fewbits.kernels.bench import command

EXAMPLES = """\
examples:
  fewbits bench kernels --generators --shapes 2048x512,16384x16384
  fewbits bench kernels --generators --device cuda --store runs
"""
SQUARE = 32  # side of the square blocks that share a bit width; sides of matrices have to be multiples of it


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    name = f"generators-{options.device}"
    if results.is_measured(options, name):
        return 0
    command.prepare(options)
    from fewbits.kernels.bench.generators import SHAPES, show, time_shapes
    from fewbits.kernels.bench.measure import warn_if_busy
    from fewbits.kernels.bench.results import machine

    warn_if_busy()
    facts = machine(options.device)
    timings = time_shapes(options.shapes or SHAPES, options.device, options.runs)
    print(f"{facts['device']}; torch {facts['torch']}; median of {options.runs} runs of each generator")
    show(timings)
    measured = {"turns": options.runs, "timed": [asdict(timed) for timed in timings]}
    results.save(options.store, name, facts, measured)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, **measured}, indent=1))
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    about = "Compare noise generators over matrix shapes: GaussWS's, Box–Muller, torch's."
    parser = CommandParser("fewbits bench kernels --generators", about, EXAMPLES)
    parser.add_argument("--generators", action="store_true", help="select this benchmark")
    parser.add_argument(
        "--shapes", type=_shapes, metavar="RxC,…", help="matrix shapes (default: the weights of Llama 3)"
    )
    command.add_options(parser)
    results.add_options(parser)
    options = parser.parse_args(argv)
    results.check_options(options, "bench kernels")
    return options


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse matrix shapes (rows x columns) such as 2048x512,16384x16384."""
    sides = [part.split("x") for part in text.split(",")]
    if not all(len(pair) == 2 and all(side.isdecimal() and _divides(int(side)) for side in pair) for pair in sides):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected shapes such as 2048x512,16384x16384, with sides that are multiples of {SQUARE}"
        )
    return tuple((int(rows), int(cols)) for rows, cols in sides)


def _divides(side: int) -> bool:
    return side > 0 and side % SQUARE == 0
