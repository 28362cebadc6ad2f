"""Measure and report the cases of the kernels: ours and a copy of the same tensor in turns, then other implementations.

All our kernels are measured before the peers, whose compilation and memory use would affect the times.

A peer is another implementation. For a case it returns a function of the tensor, which returns new tensors in the dtype
of x, or None if it does not implement the case. "torch eager" and "torch.compile" are casts, quantizers with FP32
scales, NVFP4 and samplers as users without custom kernels would write them: vectorised, in float32, with casts to
torch's float8 dtypes where torch has the format, and with torch's random numbers. So they never do more work than our
kernels.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.common.terminal import print_table
from fewbits.experiments.bench.kernel_cases import BITS, SQUARE, Case, Work
from fewbits.experiments.bench.measure import (
    PATIENCE,
    Ratio,
    Timer,
    gpu_seconds,
    keep_freed_memory,
    machine,
    seconds,
    take_turns,
)
from fewbits.kernels.quantizer import Quantizer


@dataclass(frozen=True)
class Peer:
    """Another implementation to compare with.

    package: the module that must be importable.
    work: returns the peer's function for a case, or None if the peer does not implement the case.
    slow: True if, on a CPU, the peer is timed on fewer rows when all rows would take too long.
    """

    name: str
    package: str
    work: Callable[[Case], Work | None]
    slow: bool = True
    cpu_only: bool = False

    def missing(self, device: str) -> str | None:
        """Return the reason why the peer cannot be measured on this kind of device, or None if it can."""
        if self.cpu_only and device != "cpu":
            return "it runs only on CPUs"
        return None if find_spec(self.package) else "it is not installed"

    @property
    def version(self) -> str:
        return metadata.version(self.package)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torchao's warnings about missing GPU libraries and torch.compile's warnings about graph breaks."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ------------------------------------------------------------------------------------------------ plain torch

EXPONENT = 0x7F800000
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _round(v: Tensor, q: Quantizer) -> Tensor:
    f = q.format
    if f.name in TORCH_DTYPES:
        return v.clamp(-f.max, f.max).to(TORCH_DTYPES[f.name]).float()
    step = (v.view(torch.int32) & EXPONENT).view(torch.float32).clamp(min=2.0**f.emin) * 2.0**-f.mantissa_bits
    return ((v / step).round() * step).clamp(-f.max, f.max)


def fake_quantize(x: Tensor, q: Quantizer, axis: int) -> Tensor:
    """Return x in blocks with FP32 scales or NVFP4's, or cast without scales."""
    if q.scaling == "none":
        return _round(x.float(), q).to(x.dtype)
    rows, cols = x.shape
    r, c = q.block.resolve((rows, cols), axis)
    v = x.float().view(rows // r, r, cols // c, c)
    amax = v.abs().amax((1, 3), keepdim=True)
    encode = q.format.max / amax
    decode = 1 / encode
    if q.scaling == "nvfp4":
        g = q.format.max * 448 / amax.amax()
        s8 = (amax * (g / q.format.max)).clamp(max=448).to(torch.float8_e4m3fn).float()
        encode, decode = g / s8, s8 / g
    return (_round(v * encode, q) * decode).view(x.shape).to(x.dtype)


def sample(w: Tensor, draw: Callable[[Tensor], Tensor], bits: float, square: int) -> Tensor:
    """Return the weights sampled by GaussWS eq. 3, with the same bit width `bits` for all squares of w.

    draw: a function that returns noise in the shape of its argument. square: the rows, and the columns, of a square.
    """
    squares = w.float().unflatten(0, (-1, square)).unflatten(2, (-1, square))
    scale = squares.abs().amax((1, 3), keepdim=True) * 2.0 ** (1 - bits)
    return (squares + draw(squares) * scale).view(w.shape).to(w.dtype)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda like: (torch.randn_like(like) / 2).round(),
    "uniform": lambda like: torch.rand_like(like) - 0.5,
}


def _quantizer(case: Case) -> Quantizer | None:
    """Return the quantizer of a case if the case has no second result and its quantizer no option that peers lack."""
    q = case.quantizer
    if q is None or len(case.axes) > 1 or case.stats or q.hadamard or q.needs_seed:
        return None
    return q if (q.group, q.factor, q.target, q.select) == ("tensor", 1.0, None, None) else None


def eager(case: Case) -> Work | None:
    if case.sampler:
        return partial(sample, draw=DRAWS[case.sampler], bits=BITS, square=SQUARE)
    q = _quantizer(case)
    return partial(fake_quantize, q=q, axis=case.axes[0]) if q and q.scaling in ("none", "amax", "nvfp4") else None


def compiled(case: Case) -> Work | None:
    torch.compiler.reset()  # every case is compiled separately
    work = eager(case)
    return work and torch.compile(work, dynamic=False)


# ------------------------------------------------------------------------------------------------ torchao, ml_dtypes


def torchao(case: Case) -> Work | None:
    q = _quantizer(case)
    if q is None or case.axes != (-1,):
        return None
    if q.scaling in ("e8m0", "mx") and str(q.block) == "1x32":
        mx: Any = import_module("torchao.prototype.mx_formats.mx_tensor")
        modes: Any = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
        element = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2, "e2m3": mx.DTYPE_FP6_E2M3}.get(
            q.format.name
        )
        mode = modes.FLOOR if q.scaling == "mx" else modes.RCEIL
        return lambda x: mx.MXTensor.to_mx(x, element, 32, mode).dequantize()
    if q.scaling == "nvfp4" and str(q.block) == "1x16":
        nv: Any = import_module("torchao.prototype.mx_formats.nvfp4_tensor")

        def nvfp4(x: Tensor) -> object:
            scale = nv.per_tensor_amax_to_scale(x.abs().amax())
            return nv.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize()

        return nvfp4
    return None


def ml_dtypes(case: Case) -> Work | None:
    if case.quantizer != Quantizer("e4m3"):
        return None
    types: Any = import_module("ml_dtypes")

    def cast(x: Tensor) -> object:
        if x.dtype == torch.bfloat16:
            array = x.view(torch.uint16).numpy().view(types.bfloat16)
            rounded = array.astype(types.float8_e4m3fn).astype(types.bfloat16)
            return torch.from_numpy(rounded.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(x.numpy().astype(types.float8_e4m3fn).astype(x.numpy().dtype))

    return cast


PEERS = (
    Peer("torch eager", "torch", eager),
    Peer("torch.compile", "torch", compiled, slow=False),
    Peer("torchao", "torchao", torchao),
    Peer("ml_dtypes", "ml_dtypes", ml_dtypes, cpu_only=True),
)


# ------------------------------------------------------------------------------------------------ measurements

BEYOND_L2 = 4  # on a GPU, the input tensors of a turn are together at least this many times as large as the L2 cache
PEER_TURNS = 3  # recorded turns of a peer
PEER_ROWS = 1024  # on a CPU, slow peers get only this many rows
PEER_UNIT = 128  # peers need whole blocks: rows and columns must be multiples of this
SMALL = 64 << 20  # if a tensor and its copy have fewer bytes together, they may stay in the caches
NOTES = """\
All columns except those with × are in %.
copy   time of out.copy_(x) / time of our kernel, both into memory that was written before, in turns A B A B: median
       and range over {runs} turns (fewer if they take more than {patience:g} s). encode, weights and noise have no
       out=: they allocate their results, for which glibc reuses freed memory.
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
    size: int
    runs: int
    measured: list[Measured] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)  # name -> version
    notes: list[str] = field(default_factory=list)


def run(cases: Sequence[Case], size: int, *, dtype: str, device: str, runs: int, peers: bool) -> Bench:
    """Measure the cases on tensors of size x size elements; print progress on stderr.

    dtype: the dtype of the tensors for all cases that do not set their own. runs: the largest number of turns in which
    our kernels and the copy are timed. peers: True to measure other implementations too.
    """
    keep_freed_memory()
    bench = Bench(machine(device), device, dtype, size, runs)
    tensors = _Tensors(size, getattr(torch, dtype), device)
    for number, case in enumerate(cases, start=1):
        print(f"{number}/{len(cases)} {case.name}", file=sys.stderr, flush=True)
        bench.measured.append(_measure(case, tensors, runs))
    if peers and size % PEER_UNIT:
        bench.notes.append(f"no peers were timed: they need whole blocks, so --size must be a multiple of {PEER_UNIT}")
    for peer in PEERS if peers and not bench.notes else ():
        _compare(peer, cases, bench, tensors)
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
    timers = [tensors.timer(lambda x, out: out.copy_(x)), tensors.timer(lambda x, out: case.call(x, out=out))]
    copy, into = take_turns(timers, runs)
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
            problem = str(error).partition("\n")[0][:160]
            bench.notes.append(f"{peer.name} failed on {case.name}: {type(error).__name__}: {problem}")


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
    print(f"tensor {bench.size}x{bench.size} {bench.dtype}, N(0, 1); a copy reads and writes {speed:.1f} GB/s in total")
    if bench.device == "cpu" and 2 * bench.size**2 * getattr(torch, bench.dtype).itemsize < SMALL:
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
