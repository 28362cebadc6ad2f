"""Measure and report the cases of the kernels: ours and a copy of the same tensor in turns, then other implementations.

All our kernels are measured before the peers, whose compilation and memory use would affect the times.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from fewbits.common.terminal import print_table
from fewbits.experiments.bench.kernel_cases import Case, Work
from fewbits.experiments.bench.measure import (
    PATIENCE,
    Ratio,
    Timer,
    gpu_seconds,
    in_touched_memory,
    machine,
    seconds,
    take_turns,
)
from fewbits.experiments.bench.peers import PEERS, Peer, first_line, quiet

BEYOND_L2 = 4  # on a GPU, the input tensors of a turn are together at least this many times as large as the L2 cache
PEER_TURNS = 3  # recorded turns of a peer
PEER_ROWS = 1024  # on a CPU, slow peers get only this many rows
PEER_UNIT = 128  # peers need whole blocks: rows and columns must be multiples of this
SMALL = 64 << 20  # if a tensor and its copy have fewer bytes together, they may stay in the caches
NOTES = """\
All columns except those with × are in %.
copy   time of out.copy_(x) / time of our kernel, both into memory that was written before, in turns A B A B: median
       and range over {runs} turns (fewer if they take more than {patience:g} s).
       encode, weights and noise have no public out=: their backend functions are timed, and torch is patched to give
       their results memory that was written before.
mem    the value of `copy` that memory traffic alone would allow. The traffic counts each element once per read and
       once per write. A scale of the whole tensor needs a second read (then mem is 67); a second result needs
       a second write. Cache lines that a store fetches, and second reads that hit a cache, are not considered. Noise
       generators only write; they are compared with a copy of as many elements.
at     copy / mem: the share of what memory traffic allows.
×      how many times longer a peer takes than our kernel, both returning new tensors, in turns, median of 3. Peers
       use torch's random numbers. On a CPU, all but torch.compile are timed on the first {peer_rows} rows."""
SHORT = {"torch eager": "×eager", "torch.compile": "×compile"}


@dataclass(frozen=True)
class Measured:
    """The result of one case: the columns copy (`share`) and mem (`memory`) of `NOTES`, and the times."""

    case: str  # the name of the case
    share: Ratio
    memory: float
    copy_bytes_per_second: float  # bytes read and written
    seconds: dict[str, list[float]]  # name of a timer (copy, into) -> the seconds of each turn
    peers: dict[str, Ratio] = field(default_factory=dict)  # name of the peer -> its time / our time


@dataclass
class Bench:
    machine: dict[str, str | int | float | None]
    device: str
    dtype: str
    rows: int
    cols: int
    runs: int
    measured: list[Measured] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)  # name -> version
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def run(
    cases: Sequence[Case],
    size: int,
    *,
    dtype: str,
    device: str,
    runs: int,
    peers: bool = True,
    save: Callable[[Bench], object],
) -> Bench:
    """Measure the cases on tensors of size x size elements; print progress on stderr.

    dtype: the dtype of the tensors for all cases that do not set their own.
    runs: the largest number of turns in which our kernels and the copy are timed.
    peers: True to measure other implementations too.
    save: is called with the results so far after each case and each peer, so that an interrupted run keeps them.
    """
    bench = Bench(machine(device), device, dtype, size, size, runs)
    tensors = _Tensors(size, getattr(torch, dtype), device)
    for number, case in enumerate(cases, start=1):
        print(f"{number}/{len(cases)} {case.name}", file=sys.stderr, flush=True)
        bench.measured.append(_measure(case, tensors, runs))
        save(bench)
    if peers and size % PEER_UNIT:
        bench.notes.append(f"no peers were timed: they need whole blocks, so --size must be a multiple of {PEER_UNIT}")
    for peer in PEERS if peers and not bench.notes else ():
        _compare(peer, cases, bench, tensors)
        save(bench)
    return bench


class _Tensors:
    """Pairs of an input tensor, N(0, 1), and an output buffer.

    On a CPU there is one pair. On a GPU there are several, used in turn, so that an input is no longer in the L2 cache
    when it is read again. `use_dtype` allocates the pairs, and replaces them if they have another dtype.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: str) -> None:
        self.size, self.default_dtype, self.device = size, dtype, device
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def use_dtype(self, dtype: torch.dtype | None) -> Tensor:
        """Return an input of this dtype; None: of the default dtype."""
        dtype = dtype or self.default_dtype
        if self.pairs and self.pairs[0][0].dtype == dtype:
            return self.pairs[0][0]
        self.pairs = []  # frees the old pairs before new pairs are allocated
        count = 1
        if self.device == "cuda":
            cache: int = torch.cuda.get_device_properties(0).L2_cache_size
            count = max(2, -(-BEYOND_L2 * cache // (self.size**2 * dtype.itemsize)))
        for _ in range(count):
            generator = torch.Generator(self.device).manual_seed(0)
            x = torch.randn(self.size, self.size, generator=generator, device=self.device).to(dtype)
            self.pairs.append((x, torch.zeros_like(x)))
        return self.pairs[0][0]

    def timer(self, call: Callable[[Tensor, Tensor], object], rows: int | None = None) -> Timer:
        """Return a timer for `call` on (input, buffer), both cut to the first `rows` rows (None: all)."""
        pairs = [(x[:rows], out[:rows]) for x, out in self.pairs]
        if self.device == "cuda":
            return lambda: gpu_seconds(lambda: [call(*pair) for pair in pairs]) / len(pairs)
        return partial(seconds, partial(call, *pairs[0]))


def _measure(case: Case, tensors: _Tensors, runs: int) -> Measured:
    x = tensors.use_dtype(case.dtype)
    # If the case allocates its results, every call gets the same memory; on a GPU it does so anyway.
    call = in_touched_memory(case.into) if case.backend and tensors.device == "cpu" else case.into
    copy, into = take_turns([tensors.timer(lambda x, out: out.copy_(x)), tensors.timer(call)], runs)
    return Measured(
        case=case.name,
        share=Ratio.of(copy, into),
        memory=1 / case.traffic(x.itemsize),
        copy_bytes_per_second=2 * x.nbytes / median(copy),
        seconds={"copy": copy, "into": into},
    )


def _compare(peer: Peer, cases: Sequence[Case], bench: Bench, tensors: _Tensors) -> None:
    if missing := peer.missing(tensors.device):
        bench.notes.append(f"{peer.name} skipped: {missing}")
        return
    bench.peers[peer.name] = peer.version
    rows = PEER_ROWS if peer.slow and tensors.device == "cpu" else None
    for case, measured in zip(cases, bench.measured, strict=True):
        try:
            with quiet():
                work = peer.work(case)
                if work is None:
                    continue
                print(f"{peer.name}: {case.name}", file=sys.stderr, flush=True)
                tensors.use_dtype(case.dtype)
                timers = [tensors.timer(_fresh(call), rows) for call in (work, case.call)]
                measured.peers[peer.name] = Ratio.of(*take_turns(timers, PEER_TURNS))
        except Exception as error:  # a failure of another package is a result
            bench.notes.append(f"{peer.name} failed on {case.name}: {first_line(error)}")


def _fresh(call: Work) -> Callable[[Tensor, Tensor], object]:
    return lambda x, _: call(x)


def show(bench: Bench) -> None:
    """Print the report to stdout."""
    facts = bench.machine
    speed = median([m.copy_bytes_per_second for m in bench.measured]) / 1e9
    print(
        f"{facts['device']}, load {facts['load']} at the start; fewbits {facts['fewbits']}, backend {facts['backend']}"
    )
    print(f"torch {facts['torch']}, python {facts['python']}, compiler {facts['compiler']}")
    print(f"tensor {bench.rows}x{bench.cols} {bench.dtype}, N(0, 1); a copy reads and writes {speed:.1f} GB/s in total")
    if bench.device == "cpu" and 2 * bench.rows * bench.cols * getattr(torch, bench.dtype).itemsize < SMALL:
        print("the tensor is small: the copy may stay in the caches, so these figures do not apply to large tensors")
    print()
    shown = [name for name in bench.peers if any(name in m.peers for m in bench.measured)]
    rows = [_cells(m, bench.device, shown) for m in bench.measured]
    print_table([*rows[0]], [[*row.values()] for row in rows], right=[*rows[0]][1:])
    print()
    versions = [f"{name} {bench.peers[name]}" for name in shown]
    notes = NOTES.format(runs=bench.runs, patience=PATIENCE, peer_rows=PEER_ROWS)
    print("\n".join([notes, *versions, *bench.notes]))


def _cells(m: Measured, device: str, peers: Sequence[str]) -> dict[str, str]:
    """Return the cells of a case's row in the table, by column."""
    cells = {"case": m.case}
    if device == "cuda":
        cells["µs"] = f"{1e6 * median(m.seconds['into']):.1f}"
    cells |= {
        "copy": _percent(m.share.median),
        "range": f"{_percent(m.share.low)}–{_percent(m.share.high)}",
        "mem": _percent(m.memory),
        "at": _percent(m.share.median / m.memory),
    }
    for name in peers:
        ratio = m.peers[name].median if name in m.peers else None
        text = "" if ratio is None else f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
        cells[SHORT.get(name, f"×{name}")] = text
    return cells


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
