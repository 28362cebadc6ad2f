"""Compare a quantizing function with a project's dialect, bit for bit (`fewbits conform`)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fewbits.common.arguments import CommandParser
from fewbits.common.terminal import print_json, print_table

EXAMPLES = """\
examples:
  fewbits conform mykernels:quantize --dialect te-nvfp4      compare; exit status 1 if a result differs
  fewbits conform kernels/mine.py:quantize --dialect torchao-mxfp8-rceil --json
  fewbits conform --dialects                                 list the dialects with their sources
  fewbits conform --golden te-nvfp4 --out vectors.safetensors
  fewbits conform mykernels:round_stochastically --random    bias, correlations, repeated random numbers

The function gets a float32 matrix. It returns a tensor of values, or a tuple (codes, scales, tensor scale) as the
dialect's project stores them, or a dictionary with keys from codes, scales, tensor, values. With --random it gets
(x, step, rank) and returns values. In tests with pytest, the fixture `conforms` does the same:

  def test_my_kernel(conforms):
      conforms(quantize, "te-nvfp4")"""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits conform", __doc__, EXAMPLES)
    parser.add_argument("function", nargs="?", metavar="MODULE:FUNCTION", help="a module or a file, and its function")
    parser.add_argument("--dialect", metavar="NAME", help="what the function should equal")
    parser.add_argument("--dialects", action="store_true", help="list the dialects")
    parser.add_argument("--golden", metavar="DIALECT", help="write test vectors of a dialect to --out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the new file of test vectors, in safetensors format")
    parser.add_argument("--random", action="store_true", help="check stochastic rounding instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tensors (default: 0)")
    parser.add_argument(
        "--no-explanation", action="store_true", help="do not search the step that explains a difference"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_intermixed_args(argv)
    actions = [options.dialects, options.golden is not None, options.random, options.dialect is not None]
    if sum(actions) != 1:
        parser.error("give exactly one of --dialect NAME, --dialects, --golden DIALECT and --random")
    if (options.golden is None) != (options.out is None):
        parser.error("--golden DIALECT and --out FILE belong together")
    if bool(options.function) != bool(options.random or options.dialect):
        parser.error("MODULE:FUNCTION is needed with --dialect and with --random, and only there")
    if options.dialects:
        return _list(options.json)
    if options.golden:
        return _write(options.golden, options.out.expanduser(), options.seed)
    function = load_function(options.function)
    return _check_random(function, options) if options.random else _compare(function, options)


def load_function(text: str) -> Callable[..., Any]:
    """Return the function that MODULE:FUNCTION names; modules are searched in the working directory, too."""
    module_name, _, name = text.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{text!r} is not MODULE:FUNCTION: write, for example, mykernels:quantize or mine.py:quantize")
    path = Path(module_name).expanduser()
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        sys.path.insert(0, str(path.parent.resolve()))
        module_name = path.stem
    else:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"cannot import {module_name}: {type(error).__name__}: {error}") from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{module_name} has no function {name!r}: it has {', '.join(public[:12]) or 'none'}")
    return function


def _compare(function: Callable[..., Any], options: Any) -> int:
    from fewbits.kernels.conformance import conform

    report = conform(function, options.dialect, seed=options.seed, explained=not options.no_explanation)
    if options.json:
        print_json({**asdict(report), "equal": report.equal})
    else:
        print("\n".join(report.lines()))
    return 0 if report.equal else 1


def _check_random(function: Callable[..., Any], options: Any) -> int:
    from fewbits.kernels.randomness import check_randomness

    checks = check_randomness(function, seed=options.seed)
    if options.json:
        print_json([asdict(check) for check in checks])
    else:
        rows = [
            (check.name, f"{check.measured:.3g}", "ok" if check.passed else "FAILED", check.about) for check in checks
        ]
        print_table(("check", "measured", "", "measures"), rows, right=("measured",))
    return 0 if all(check.passed for check in checks) else 1


def _list(json: bool) -> int:
    from fewbits.kernels.dialects import DIALECTS

    if json:
        print_json([asdict(row) for row in DIALECTS.values()])
    else:
        rows = [(row.name, row.quantizer, row.source) for row in DIALECTS.values()]
        print_table(("dialect", "quantizer", "source"), rows)
    return 0


def _write(name: str, out: Path, seed: int) -> int:
    from fewbits.kernels.conformance import find_dialect, golden

    dialect = find_dialect(name)
    if out.is_dir():
        raise ValueError(f"{out} is a folder: give the name of a file for --out")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent}: no such folder")
    from safetensors.torch import save

    from fewbits.common.atomic import write_atomically

    write_atomically(out, save(*golden(dialect, seed)))
    print(out)
    return 0
