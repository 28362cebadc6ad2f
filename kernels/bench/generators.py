"""Time noise generators over matrix shapes, as in GaussWS's Figure 6.

    bitwise      ours: rounded normal noise from 16 random bits by bit operations (eq. 10), packed in 4 bits
    box-muller   the exact distribution that it approximates, round(z / 2), from uniform numbers: C++ or torch.compile
    torch        torch's own normal numbers, unrounded: less work than the others

For each shape two things are timed: the generator alone, and all of eq. 3, ŵ = w + R · 2^(1−b) · max|w| in BF16, which
the paper's figure shows. For Box–Muller the second exists only on a GPU, where torch's compiler fuses it. Arms take
turns.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from fewbits.common.tables import print_table
from fewbits.kernels.backends import build
from fewbits.kernels.bench import eager
from fewbits.kernels.bench.cases import BITS, SQUARE, Case, Work, gaussian_noise, sample_weight
from fewbits.kernels.bench.measure import in_touched_memory, seconds, take_turns
from fewbits.kernels.bench.peers import box_muller, randn

# From the smallest weights of Llama 3.2 1B to the largest of Llama 3.1 405B, which the paper's text names; those in
# between are assumed.
SHAPES = ((2048, 512), (2048, 2048), (2048, 8192), (8192, 8192), (16384, 1024), (16384, 4096), (16384, 16384))
BITWISE, BOX_MULLER, TORCH = "bitwise", "box-muller", "torch"
CASES = {"generator": gaussian_noise(), "forward": sample_weight("gaussian")}
TITLES = {"generator": "generator alone", "forward": "w + R · 2^(1−b) · max|w|"}
PEER_ELEMENTS = 1 << 24  # eq. 3 in plain torch gets this many: it needs ten times the matrix in memory


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


def time_shapes(shapes: Sequence[tuple[int, int]], device: str, runs: int) -> list[Timed]:
    timings = []
    for rows, cols in shapes:
        print(f"fewbits: timing {rows}x{cols} in {runs} turns", file=sys.stderr, flush=True)
        w = torch.randn(rows, cols, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()
        for what, case in CASES.items():
            arms = _arms(case, w)
            timers = [partial(seconds, partial(work, x), device) for work, x in arms.values()]
            times = take_turns(timers, runs)
            timings += [
                Timed(rows, cols, what, arm, x.numel(), list_)
                for (arm, (_, x)), list_ in zip(arms.items(), times, strict=True)
            ]
    return timings


def _arms(case: Case, w: Tensor) -> dict[str, tuple[Work, Tensor]]:
    """Return the functions to compare, each with the tensor that it gets."""
    few = w[: max(SQUARE, PEER_ELEMENTS // w.shape[1] // SQUARE * SQUARE)]
    arms: dict[str, tuple[Work, Tensor]] = {BITWISE: (in_touched_memory(lambda x: case.into(x, x)), w)}
    if w.is_cuda:
        work = partial(eager.sample, draw=_box_muller, bits=BITS, square=SQUARE) if case.eager else _box_muller
        arms[BOX_MULLER] = torch.compile(work, dynamic=True), w
    elif case.is_noise and build.compiler():
        arms[BOX_MULLER] = box_muller(), w
    arms[TORCH] = (case.eager, few) if case.eager else (randn(), w)
    return arms


def _box_muller(like: Tensor) -> Tensor:
    """Return round(N(0, 1) / 2) as int8."""
    u, v = (torch.rand(like.shape, device=like.device) for _ in range(2))
    z = torch.sqrt(-2 * torch.log(1 - u)) * torch.cos(2 * math.pi * v)
    return (z / 2).round().to(torch.int8)


def show(timings: Sequence[Timed]) -> None:
    """Print a table for each of the two things that are timed."""
    arms = (BITWISE, BOX_MULLER, TORCH)
    for what, title in TITLES.items():
        speeds = {(t.rows, t.cols, t.arm): f"{t.speed / 1e9:.3g}" for t in timings if t.what == what}
        print(f"\n10⁹ elements/s, {title}:")
        shapes = dict.fromkeys((rows, cols) for rows, cols, _ in speeds)
        rows = ((f"{r}x{c}", *(speeds.get((r, c, arm), "-") for arm in arms)) for r, c in shapes)
        print_table(("shape", *arms), rows, right=arms)
