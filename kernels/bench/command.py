"""Implement `fewbits bench kernels`: time the kernels, a copy of the same tensor and other implementations in one run.

For each case it reports the speed as a share of the copy's; the shares that memory traffic and arithmetic alone would
allow, hence which of them is the limit and how much of it is reached; the same for calls that allocate; temporary
memory; and how many times longer the peers take. report.py prints with the table what is counted.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from fewbits.common.arguments import CommandParser
from fewbits.common.store_folder import store_folder
from fewbits.kernels.backends import cuda
from fewbits.kernels.bench import cuda as bench_cuda
from fewbits.kernels.bench import generators as bench_generators
from fewbits.kernels.bench import measure as measure
from fewbits.kernels.bench.cases import CASES, Case, Noise
from fewbits.kernels.bench.measure import Ratio
from fewbits.kernels.bench.peers import GENERATORS, PEERS, Peer, first_line, quiet
from fewbits.kernels.bench.report import Bench, Compared, Measured, as_json, as_text, machine

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
IN_CACHE_ROWS = 256  # per thread; in total more than a tile of the CPU kernels, so that every thread has work
IN_CACHE = 128 << 10  # bytes per thread of the smaller tensor; the double one with its result is half a MiB
PEER_TURNS = 3
PEER_SECONDS = 0.3  # a slow peer gets as many rows as it can process in about this time
PEER_UNIT = 128  # peers need whole blocks: rows and columns must be multiples of this


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number ≥ 1")
    return int(text)


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    try:
        return bench_generators.parse_shapes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        "fewbits bench kernels",
        about="Time the kernels, a copy of the same tensor and other implementations, in one run.",
        examples="example: fewbits bench kernels --size 4096 --only nvfp4 --json nvfp4.json",
    )
    parser.add_argument("--size", type=_positive, default=8192, metavar="N", help="rows and columns (default: 8192)")
    parser.add_argument("--rows", type=_positive, metavar="R", help="rows (default: N)")
    parser.add_argument("--cols", type=_positive, metavar="C", help="columns (default: N)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the tensor (default: bfloat16)")
    parser.add_argument("--threads", type=_positive, metavar="N", help="threads (default: torch's)")
    parser.add_argument("--runs", type=_positive, default=5, metavar="N", help="runs of each case (default: 5)")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="run only cases whose name contains this")
    parser.add_argument("--no-peers", action="store_true", help="time only our kernels and the copy: under a minute")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all results, single times included, to FILE"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--generators",
        action="store_true",
        help="compare noise generators over matrix shapes: GaussWS, Box–Muller, torch",
    )
    parser.add_argument(
        "--shapes", type=_shapes, metavar="RxC,…", help="with --generators: matrix shapes (default: Llama 3's weights)"
    )
    parser.add_argument("--store", metavar="RUNS", help="with --generators: save the result in RUNS/bench, for reports")
    parser.add_argument(
        "--once", action="store_true", help="with --store: skip the benchmark if RUNS/bench has its result"
    )
    options = parser.parse_args(argv)

    for name, required in (("shapes", "generators"), ("store", "generators"), ("once", "store")):
        if getattr(options, name) and not getattr(options, required):
            raise ValueError(f"bench kernels: --{name} requires --{required}")
    options.store = options.store and store_folder(options.store)
    missing = cuda.complaint() if options.device == "cuda" else None
    if missing:
        raise ValueError(f"bench kernels: --device cuda: {missing}; valid on this machine is cpu")
    if not _select_cases(options.only):
        names = ", ".join(case.name for case in CASES)
        raise ValueError(f"bench kernels: --only {options.only!r} matches no case; valid are parts of {names}")
    if options.json and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise ValueError(f"bench kernels: --json {options.json}: expected a file in an existing folder")
    return options


def _select_cases(part: str) -> list[Case]:
    return [case for case in CASES if part in case.name]


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    if options.device == "cuda" and not options.generators:
        return bench_cuda.main(
            _select_cases(options.only),
            *(options.rows or options.size, options.cols or options.size, DTYPES[options.dtype], options.runs),
            peers=not options.no_peers,
            json_file=options.json,
        )
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(options.threads or threads_before)
        if options.generators:
            shapes, files = (
                options.shapes or bench_generators.SHAPES,
                {"store": options.store, "once": options.once, "json_file": options.json},
            )
            return bench_generators.main(shapes, options.device, options.runs, **files)
        bench = _bench(options)
    finally:
        torch.set_num_threads(threads_before)
    print(as_text(bench))
    if options.json:
        options.json.write_text(as_json(bench))
    return 0


def _bench(options: argparse.Namespace) -> Bench:
    """Measure all our kernels first, then the peers, whose compilers and memory would disturb them."""
    cases, rows, cols = _select_cases(options.only), options.rows or options.size, options.cols or options.size
    bench = Bench(machine(), options.dtype, rows, cols, options.runs)
    tensors = _Tensors(rows, cols, DTYPES[options.dtype])
    for number, case in enumerate(cases, start=1):
        _progress(f"{number}/{len(cases)} {case.name}")
        bench.measured.append(_measure(case, tensors, options.runs))
    if not options.no_peers:
        _compare(bench, tensors)
    return bench


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Tensors:
    """The tensors of a run, N(0, 1) in one dtype at a time: a large and two small ones, each with a buffer."""

    def __init__(self, rows: int, cols: int, dtype: torch.dtype) -> None:
        self.rows, self.cols, self.default_dtype = rows, cols, dtype
        self.x = self.out = torch.empty(0)

    def use_dtype(self, dtype: torch.dtype | None) -> None:
        dtype = dtype or self.default_dtype
        if self.x.numel() and self.x.dtype == dtype:
            return
        self.x = self.out = torch.empty(0)  # freed before the next is allocated
        self.x = _normal(self.rows, self.cols, dtype)
        self.out = torch.zeros_like(self.x)

        rows, cols = IN_CACHE_ROWS * torch.get_num_threads(), IN_CACHE // IN_CACHE_ROWS // dtype.itemsize
        self.small, self.double = (
            (x, torch.zeros_like(x)) for x in (_normal(rows, n, dtype) for n in (cols, 2 * cols))
        )


def _normal(rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(dtype)


# ------------------------------------------------------------------------------------------------ ours


def _measure(case: Case, tensors: _Tensors, runs: int) -> Measured:
    tensors.use_dtype(case.dtype)
    x, out = tensors.x, tensors.out
    into_touched = _into_touched_memory(case)
    copy, into, small, double = measure.beside_cache(
        lambda: out.copy_(x),
        lambda: into_touched(x, out),
        lambda: into_touched(*tensors.small),
        lambda: into_touched(*tensors.double),
        runs,
    )
    clone, fresh = measure.take_turns([x.clone, lambda: case.fresh(x)], runs)
    extra = measure.peak_memory(lambda: case.into(x, out))
    elements = tensors.double[0].numel() - tensors.small[0].numel()
    # A limit is the best measured value.
    in_cache = measure.seconds_per_element(min(small), min(double), elements, min(into) / x.numel())
    return Measured(
        case=case.name,
        noise=isinstance(case, Noise),
        share=Ratio.of(copy, into),
        memory=1 / case.traffic(x.dtype.itemsize),
        arithmetic=min(copy) / x.numel() / in_cache if in_cache else None,
        allocating=Ratio.of(clone, fresh),
        temporary=None if extra is None else extra / x.nbytes,
        copy_bytes_per_second=2 * x.nbytes / median(copy),
        seconds_per_element=median(into) / x.numel(),
        seconds={"copy": copy, "into": into, "small": small, "double": double, "clone": clone, "fresh": fresh},
        in_cache_elements=elements,
    )


def _into_touched_memory(case: Case) -> Callable[[Tensor, Tensor], object]:
    """Return case.into with its results in memory that was written before, even if it allocates them itself."""
    if case.has_out:
        return case.into
    memory = measure.TouchedMemory()

    def into(x: Tensor, out: Tensor) -> object:
        with memory:
            return case.into(x, out)

    return into


# ------------------------------------------------------------------------------------------------ peers


def _compare(bench: Bench, tensors: _Tensors) -> None:
    if bench.rows % PEER_UNIT or bench.cols % PEER_UNIT:
        bench.notes.append(f"no peers: they need whole blocks, so rows and columns must be multiples of {PEER_UNIT}")
        return
    by_name = {case.name: case for case in CASES}
    for peer in (*PEERS, *GENERATORS):
        missing = peer.missing()
        if missing:
            bench.notes.append(f"{peer.name} skipped: {missing}")
            continue
        bench.peers[peer.name] = peer.version
        for measured in bench.measured:
            case = by_name[measured.case]
            try:
                with quiet():
                    compared = _compare_one(peer, case, tensors)
            except Exception as error:  # a failure of another package is a result
                bench.notes.append(f"{peer.name} failed on {case.name}: {first_line(error)}")
                continue
            if compared:
                measured.peers[peer.name] = compared


def _compare_one(peer: Peer, case: Case, tensors: _Tensors) -> Compared | None:
    work = peer.work(case)
    if work is None:
        return None
    _progress(f"{peer.name}: {case.name}")
    tensors.use_dtype(case.dtype)
    x = tensors.x[: _rows_for(work, tensors.x)] if peer.slow else tensors.x
    into = _into_touched_memory(case)
    our_work = (lambda: into(x, x)) if isinstance(case, Noise) else (lambda: case.fresh(x))
    theirs_seconds, our_seconds = measure.take_turns([lambda: work(x), our_work], PEER_TURNS)
    extra = measure.peak_memory(lambda: work(x))
    return Compared(
        longer=Ratio.of(theirs_seconds, our_seconds),
        rows=x.shape[0],
        temporary=None if extra is None else extra / x.nbytes,
        seconds={"theirs": theirs_seconds, "ours": our_seconds},
    )


def _rows_for(work: Callable[[Tensor], object], x: Tensor) -> int:
    """Return as many rows, halved from all, as the peer can process in about PEER_SECONDS, judged by a call on few."""
    few = max(PEER_UNIT, x.shape[0] // 16 // PEER_UNIT * PEER_UNIT)
    work(x[:few])
    seconds = measure.seconds(lambda: work(x[:few])) / few
    rows = x.shape[0]
    while rows * seconds > PEER_SECONDS and rows // 2 >= PEER_UNIT and rows // 2 % PEER_UNIT == 0:
        rows //= 2
    return rows
