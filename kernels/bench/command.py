"""Implement `fewbits bench kernels`: time the kernels, a copy of the same tensor and other implementations in one run.

For each case the command reports the speed of the kernel relative to the speed of the copy, and two upper bounds of
this relative speed: one from memory traffic alone, one from arithmetic alone. The smaller bound is the limit, and the
command reports the share of the limit that the kernel reaches. It also reports the speed of the call that
allocates its results, relative to a copy that allocates its result too; the temporary memory of a call; and how many
times longer other implementations (peers) take. The notes that report.py prints below the table define each column.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fewbits.common.arguments import CommandParser, positive
from fewbits.common.atomic import write_atomically

DTYPES = ("bfloat16", "float16", "float32")
EXAMPLES = """\
examples:
  fewbits bench kernels --size 4096 --only nvfp4 --json nvfp4.json
  fewbits bench kernels --generators --help    the noise generators of GaussWS over matrix shapes
"""


def _options(argv: Sequence[str]) -> argparse.Namespace:
    about = "Time the kernels, a copy of the same tensor and other implementations, in one run."
    parser = CommandParser("fewbits bench kernels", about, EXAMPLES)
    parser.add_argument("--size", type=positive, default=8192, metavar="N", help="rows and columns (default: 8192)")
    parser.add_argument("--rows", type=positive, metavar="R", help="rows (default: N)")
    parser.add_argument("--cols", type=positive, metavar="C", help="columns (default: N)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the tensor (default: bfloat16)")
    parser.add_argument(
        "--only", default="", metavar="SUBSTRING", help="run only the cases whose names contain this text"
    )
    parser.add_argument("--no-peers", action="store_true", help="time only our kernels and the copy: under a minute")
    add_options(parser)
    return parser.parse_args(argv)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks of kernels have: --device, --threads, --runs and --json."""
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cpu or cuda (default: cpu)")
    parser.add_argument("--threads", type=positive, metavar="N", help="number of threads (default: torch's)")
    parser.add_argument(
        "--runs", type=positive, default=5, metavar="N", help="number of runs of each case (default: 5)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all results, and the time of every timed call, to FILE"
    )


def prepare(options: argparse.Namespace) -> None:
    """Set torch's number of threads, and check the options --device and --json.

    --json is the path of the file for the results. Raise ValueError if the device is not available, if this path is a
    folder, or if the folder that is to contain the file does not exist.
    """
    import torch

    from fewbits.kernels.backends.gpu import cuda

    if options.device == "cuda" and (complaint := cuda.complaint()):
        raise ValueError(f"bench kernels: --device cuda: {complaint}; the only valid device on this machine is cpu")
    if options.json and ((options.json.exists() and not options.json.is_file()) or not options.json.parent.is_dir()):
        raise ValueError(f"bench kernels: --json {options.json}: expected a file in an existing folder")
    if options.threads:
        torch.set_num_threads(options.threads)


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    prepare(options)

    from fewbits.kernels.bench.cases import CASES
    from fewbits.kernels.bench.report import show
    from fewbits.kernels.bench.results import Bench
    from fewbits.kernels.bench.run import run

    def save(bench: Bench) -> None:
        if options.json:
            write_atomically(options.json.resolve(), bench.as_json().encode())

    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        names = ", ".join(case.name for case in CASES)
        raise ValueError(
            f"bench kernels: --only {options.only!r} matches no case: pass a part of one of these names: {names}"
        )
    bench = run(
        cases,
        options.rows or options.size,
        options.cols or options.size,
        dtype=options.dtype,
        device=options.device,
        runs=options.runs,
        peers=not options.no_peers,
        save=save,
    )
    show(bench)
    return 0
