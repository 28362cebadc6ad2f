"""Implement `fewbits bench kernels --generators`: time noise generators over matrix shapes, as in GaussWS's Figure 6.

    bitwise      ours: rounded normal noise from 16 random bits by bit operations (eq. 10), packed in 4 bits
    box-muller   the exact distribution that it approximates, round(z / 2), from uniform numbers: C++ or torch.compile
    torch        torch's own normal numbers, unrounded: less work than the others

For each shape two things are timed: the generator alone, and all of eq. 3, ŵ = w + R · 2^(1−b) · max|w| in BF16, which
the paper's figure shows. For Box–Muller the second exists only on a GPU, where torch's compiler fuses it. Arms take
turns.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from fewbits.kernels.backends import build, cpu
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.bench import measure as bench_measure
from fewbits.kernels.bench.cases import SEED, Noise, Sample
from fewbits.kernels.bench.measure import TouchedMemory
from fewbits.kernels.bench.peers import eager
from fewbits.kernels.bench.report import machine

# From the smallest weights of Llama 3.2 1B to the largest of Llama 3.1 405B, which the paper's text names; those in
# between are assumed.
SHAPES = ((2048, 512), (2048, 2048), (2048, 8192), (8192, 8192), (16384, 1024), (16384, 4096), (16384, 16384))
BITWISE, BOX_MULLER, TORCH = "bitwise", "box-muller", "torch"
PEER_ELEMENTS = 1 << 24  # eq. 3 in plain torch gets this many: it needs ten times the matrix in memory
Call = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """The times of one arm at one shape."""

    rows: int
    cols: int
    what: str  # generator, or forward
    arm: str
    elements: int  # per call
    seconds: list[float]  # of each turn

    @property
    def speed(self) -> float:
        """The speed in elements per second."""
        return self.elements / median(self.seconds)


def main(
    shapes: Sequence[tuple[int, int]],
    device: str,
    runs: int,
    *,
    store: Path | None,
    once: bool = False,
    json_file: Path | None = None,
) -> int:
    result_file = None if store is None else store / "bench" / f"generators-{device}.json"
    if once and result_file is not None and result_file.exists():
        print(f"{result_file} exists: nothing is measured (delete it to measure again)")
        return 0
    if warning := bench_measure.busy(os.getloadavg()[0], os.cpu_count() or 1):
        print(f"fewbits: {warning}", file=sys.stderr)
    timings: list[Timed] = []
    for rows, cols in shapes:
        print(f"fewbits: timing {rows}x{cols} in {runs} turns", file=sys.stderr, flush=True)
        timings += _time_shape((rows, cols), torch.device(device), runs)
    facts = {**machine(), "device": _device(device), "time": time.time()}
    report = {"machine": facts, "turns": runs, "timed": [asdict(timed) for timed in timings]}
    print(_text(timings, _device(device), runs))
    text = json.dumps(report, indent=1)
    if json_file is not None:
        json_file.write_text(text)
    if result_file is not None:
        _write_atomically(result_file, text)
    return 0


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse shapes such as 2048x512,16384x16384."""
    sides = [part.split("x") for part in text.split(",")]
    if not all(len(pair) == 2 and all(side.isdecimal() and int(side) > 0 for side in pair) for pair in sides):
        raise ValueError(f"{text!r}: expected shapes such as 2048x512,16384x16384")
    return tuple((int(rows), int(cols)) for rows, cols in sides)


def _write_atomically(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def _time_shape(shape: tuple[int, int], device: torch.device, runs: int) -> list[Timed]:
    """Time all arms at one shape, with results in memory that was written before."""
    w = torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()
    timings: list[Timed] = []
    for what, arms in (("generator", _generators(w)), ("forward", _forward(w))):
        times = bench_measure.take_turns([_synchronized(call, device) for _, call in arms.values()], runs)
        timings += [
            Timed(*shape, what, name, elements, seconds)
            for (name, (elements, _)), seconds in zip(arms.items(), times, strict=True)
        ]
    return timings


def _generators(w: Tensor) -> Mapping[str, tuple[int, Call]]:
    count, case = w.numel(), Noise("gaussian")
    buffer = torch.empty(w.shape, device=w.device)
    arms: dict[str, tuple[int, Call]] = {BITWISE: (count, _in_touched_memory(lambda: case.into(w, w)))}
    if w.device.type == "cuda":
        noise = torch.compile(_box_muller, dynamic=True)
        arms[BOX_MULLER] = count, lambda: noise(w)
    elif build.compiler() is not None:
        arms[BOX_MULLER] = count, _in_touched_memory(lambda: cpu.box_muller(count, SEED))
    arms[TORCH] = count, buffer.normal_
    return arms


def _forward(w: Tensor) -> Mapping[str, tuple[int, Call]]:
    case = Sample("gaussian")
    widths = case.widths(w)
    backend, block = backend_for(w.device.type), case.block
    plain, few = eager(case), w[: max(block, PEER_ELEMENTS // w.shape[1] // block * block)]
    assert plain is not None
    arms: dict[str, tuple[int, Call]] = {
        BITWISE: (
            w.numel(),
            _in_touched_memory(lambda: backend.sample_weight(w, widths, SEED, case.noise, block, w.dtype)),
        )
    }
    if w.device.type == "cuda":
        compiled = torch.compile(_sampled, dynamic=True)
        arms[BOX_MULLER] = w.numel(), lambda: compiled(w, widths, block)
    arms[TORCH] = few.numel(), lambda: plain(few)
    return arms


def _in_touched_memory(call: Call) -> Call:
    memory = TouchedMemory()

    def inside() -> object:
        with memory:
            return call()

    return inside


def _box_muller(like: Tensor) -> Tensor:
    """Return round(N(0, 1) / 2) as int8."""
    u, v = (torch.rand(like.shape, device=like.device) for _ in range(2))
    z = torch.sqrt(-2 * torch.log(1 - u)) * torch.cos(2 * math.pi * v)
    return (z / 2).round().to(torch.int8)


def _sampled(w: Tensor, widths: Tensor, block: int) -> Tensor:
    squares = w.float().unflatten(0, (-1, block)).unflatten(2, (-1, block))
    scale = squares.abs().amax((1, 3), keepdim=True) * torch.exp2(1 - widths)[:, None, :, None]
    return (squares + _box_muller(squares) * scale).view(w.shape).to(w.dtype)


def _synchronized(call: Call, device: torch.device) -> Call:
    """Return a call that also waits for the GPU."""
    if device.type != "cuda":
        return call

    def until_done() -> object:
        result = call()
        torch.cuda.synchronize(device)
        return result

    return until_done


def _device(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    facts = machine()
    return f"{facts['cpu']}, {facts['threads']} of {facts['cores']} cores"


def _text(timings: Sequence[Timed], device: str, runs: int) -> str:
    arms = (BITWISE, BOX_MULLER, TORCH)
    lines = [
        f"{device}; torch {torch.__version__}; 10⁹ elements/s, median of {runs} turns",
        "",
        f"{'':14}{'generator':^33}  {'w + R · 2^(1−b) · max|w|':^33}".rstrip(),
        f"{'':14}" + 2 * "".join(f"{name:>11}" for name in arms),
    ]
    for rows, cols in dict.fromkeys((timed.rows, timed.cols) for timed in timings):
        speeds = {(t.what, t.arm): t.speed / 1e9 for t in timings if (t.rows, t.cols) == (rows, cols)}
        cells = [speeds.get((what, arm)) for what in ("generator", "forward") for arm in arms]
        lines.append(f"{f'{rows}x{cols}':14}" + "".join(f"{'-' if v is None else f'{v:.3g}':>11}" for v in cells))
    return "\n".join(lines)
