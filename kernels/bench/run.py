"""Measure the benchmark's cases: our kernels and a copy of the same tensor in turns, then other implementations.

All our kernels are measured before the peers, whose compilation and memory use would affect the times.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from fewbits.kernels.bench.cases import Case, Work
from fewbits.kernels.bench.measure import (
    Ratio,
    Timer,
    burst_seconds,
    gpu_seconds,
    in_touched_memory,
    peak_memory,
    seconds,
    seconds_per_element,
    take_turns,
)
from fewbits.kernels.bench.peers import PEERS, Peer, first_line, quiet
from fewbits.kernels.bench.results import Bench, Compared, Measured, machine

BEYOND_L2 = 4  # on a GPU, the input tensors of a turn are together at least this many times as large as the L2 cache
IN_CACHE_ROWS = 256  # rows per thread of the tensors for `arith`, enough to give every thread a tile of the CPU kernels
IN_CACHE = 128 << 10  # bytes per thread of the small tensor; the doubled tensor and its result take half a MiB
PEER_TURNS = 3  # recorded turns of a peer
PEER_SECONDS = 0.3  # a slow peer gets as many rows as it can process in about this time
PEER_UNIT = 128  # peers need whole blocks: rows and columns must be multiples of this


def run(
    cases: Sequence[Case],
    rows: int,
    cols: int,
    *,
    dtype: str,
    device: str,
    runs: int,
    peers: bool = True,
    save: Callable[[Bench], object],
) -> Bench:
    """Measure the cases on tensors of this size; print progress on stderr.

    dtype: the dtype of the tensors for all cases that do not set their own.
    runs: the largest number of turns in which our kernels and the copy are timed.
    peers: True to measure other implementations too.
    save: a function that is called with the results so far after each case and each peer, so that an interrupted run
        keeps its results.
    """
    bench = Bench(machine(device), device, dtype, rows, cols, runs)
    tensors = _Tensors(rows, cols, getattr(torch, dtype), device)
    for number, case in enumerate(cases, start=1):
        _progress(f"{number}/{len(cases)} {case.name}")
        bench.measured.append(_measure(case, tensors, runs))
        save(bench)
    if peers and (rows % PEER_UNIT or cols % PEER_UNIT):
        bench.notes.append(
            f"no peers were timed: they need whole blocks, so rows and columns must be multiples of {PEER_UNIT}"
        )
        save(bench)
    elif peers:
        for peer in PEERS:
            _compare(peer, cases, bench, tensors)
            save(bench)
    return bench


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Tensors:
    """Pairs of an input tensor, N(0, 1), and an output buffer.

    On a CPU there is one pair. On a GPU there are several, used in turn, so that an input is no longer in the L2 cache
    when it is read again. `use_dtype` allocates the pairs, and replaces them if they have another dtype.
    """

    def __init__(self, rows: int, cols: int, dtype: torch.dtype, device: str) -> None:
        self.rows, self.cols, self.default_dtype, self.device = rows, cols, dtype, device
        self.pairs: list[tuple[Tensor, Tensor]] = []

    @property
    def x(self) -> Tensor:
        return self.pairs[0][0]

    def use_dtype(self, dtype: torch.dtype | None) -> None:
        dtype = dtype or self.default_dtype
        if self.pairs and self.x.dtype == dtype:
            return
        self.pairs = []  # frees the old pairs before new pairs are allocated
        count = 1
        if self.device == "cuda":
            cache: int = torch.cuda.get_device_properties(0).L2_cache_size
            count = max(2, -(-BEYOND_L2 * cache // (self.rows * self.cols * dtype.itemsize)))
        self.pairs = [self.pair(self.rows, self.cols, dtype) for _ in range(count)]

    def pair(self, rows: int, cols: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, cols, generator=torch.Generator(self.device).manual_seed(0), device=self.device).to(dtype)
        return x, torch.zeros_like(x)

    def timer(self, call: Callable[[Tensor, Tensor], object], rows: int | None = None) -> Timer:
        """Return a timer for `call` on (input, buffer), both cut to the first `rows` rows (None: all)."""
        pairs = [(x[:rows], out[:rows]) for x, out in self.pairs]
        if self.device == "cuda":
            return lambda: gpu_seconds(lambda: [call(*pair) for pair in pairs]) / len(pairs)
        return partial(seconds, partial(call, *pairs[0]))


def _into(case: Case, device: str) -> Callable[[Tensor, Tensor], object]:
    """Return case.into, a function of (input, buffer) that is timed.

    If it does not write into the buffer but allocates its results, wrap it so that every call gets the same memory.
    On a GPU this is not needed, because torch's allocator reuses memory.
    """
    return case.into if case.has_out or device == "cuda" else in_touched_memory(case.into)


# ------------------------------------------------------------------------------------------------ ours


def _measure(case: Case, tensors: _Tensors, runs: int) -> Measured:
    tensors.use_dtype(case.dtype)
    into = _into(case, tensors.device)
    times = {"copy": tensors.timer(lambda x, out: out.copy_(x)), "into": tensors.timer(into)}
    if tensors.device == "cpu":
        rows, cols = IN_CACHE_ROWS * torch.get_num_threads(), IN_CACHE // IN_CACHE_ROWS // tensors.x.itemsize
        for name, columns in (("small", cols), ("double", 2 * cols)):
            times[name] = partial(burst_seconds, partial(into, *tensors.pair(rows, columns, tensors.x.dtype)))
    timed = dict(zip(times, take_turns([*times.values()], runs), strict=True))
    timed["clone"], timed["fresh"] = take_turns(
        [tensors.timer(lambda x, _: x.clone()), tensors.timer(lambda x, _: case.fresh(x))], runs
    )
    arithmetic = None
    if tensors.device == "cpu":  # a limit is the best measured value
        each = min(timed["into"]) / tensors.x.numel()
        in_cache = seconds_per_element(min(timed["small"]), min(timed["double"]), rows * cols, each)
        arithmetic = min(timed["copy"]) / tensors.x.numel() / in_cache if in_cache else None
    return Measured(
        case=case.name,
        noise=case.is_noise,
        share=Ratio.of(timed["copy"], timed["into"]),
        memory=1 / case.traffic(tensors.x.itemsize),
        arithmetic=arithmetic,
        allocating=Ratio.of(timed["clone"], timed["fresh"]),
        temporary=_temporary(case.fresh, tensors.x),
        copy_bytes_per_second=2 * tensors.x.nbytes / median(timed["copy"]),
        seconds_per_element=median(timed["into"]) / tensors.x.numel(),
        seconds=timed,
    )


def _temporary(call: Work, x: Tensor) -> float | None:
    """Return the peak memory during a call, without x and the new result, relative to the bytes of x; None on a GPU."""
    if x.is_cuda:
        return None
    call(x)  # makes the further inputs of the case
    extra = peak_memory(lambda: call(x))
    return None if extra is None else extra / x.nbytes


# ------------------------------------------------------------------------------------------------ peers


def _compare(peer: Peer, cases: Sequence[Case], bench: Bench, tensors: _Tensors) -> None:
    if missing := peer.missing(tensors.device):
        bench.notes.append(f"{peer.name} skipped: {missing}")
        return
    bench.peers[peer.name] = peer.version
    for case, measured in zip(cases, bench.measured, strict=True):
        try:
            with quiet():
                work = peer.work(case)
                if work is not None:
                    _progress(f"{peer.name}: {case.name}")
                    measured.peers[peer.name] = _compare_one(work, peer.slow, case, tensors)
        except Exception as error:  # a failure of another package is a result
            bench.notes.append(f"{peer.name} failed on {case.name}: {first_line(error)}")


def _compare_one(work: Work, slow: bool, case: Case, tensors: _Tensors) -> Compared:
    tensors.use_dtype(case.dtype)
    rows = _rows_for(work, tensors.x) if slow and tensors.device == "cpu" else tensors.rows
    into = _into(case, tensors.device)
    ours = (lambda x, _: into(x, x)) if case.is_noise else (lambda x, _: case.fresh(x))
    their_seconds, our_seconds = take_turns(
        [tensors.timer(lambda x, _: work(x), rows), tensors.timer(ours, rows)], PEER_TURNS
    )
    return Compared(
        longer=Ratio.of(their_seconds, our_seconds),
        rows=rows,
        temporary=_temporary(work, tensors.x[:rows]),
        seconds={"theirs": their_seconds, "ours": our_seconds},
    )


def _rows_for(work: Work, x: Tensor) -> int:
    """Return for how many rows of x `work` takes at most about PEER_SECONDS; `work` is another library's function.

    The result is the number of all rows, halved until the call is short enough or half would be no multiple of
    PEER_UNIT. The time per row is measured by a call on few rows.
    """
    few = x[: max(PEER_UNIT, x.shape[0] // 16 // PEER_UNIT * PEER_UNIT)]
    work(few)
    each = seconds(lambda: work(few)) / len(few)
    rows = x.shape[0]
    while rows * each > PEER_SECONDS and rows // 2 >= PEER_UNIT and rows // 2 % PEER_UNIT == 0:
        rows //= 2
    return rows
