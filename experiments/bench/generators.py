"""Time noise generators over matrix shapes, as in GaussWS's Figure 6.

    bitwise      our generator: rounded normal noise from 16 random bits by bit operations (eq. 10), packed in 4 bits
    box-muller   round(z / 2) of normal z, the distribution that `bitwise` approximates: in C++ on a CPU, with
                 torch.compile on a GPU
    torch        normally distributed numbers of torch without rounding, which is less work than the other two do

For each shape two things are timed: the generator alone, and the whole of GaussWS's eq. 3, which the paper's figure
shows: the weight sampled in BF16, ŵ = w + R · 2^(1−b) · max|w|, with noise R and bit width b. With Box–Muller, eq. 3 is
timed only on a GPU, where torch.compile fuses it. For eq. 3, `torch` computes the equation in plain torch, and rounds
the normally distributed numbers. The generators take turns.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from fewbits.common.terminal import print_table
from fewbits.experiments.bench import kernels as peers
from fewbits.experiments.bench.kernel_cases import BITS, SEED, SQUARE, Case, Work, generate, sample_weight
from fewbits.experiments.bench.measure import OtherProcesses, keep_freed_memory, seconds, take_turns
from fewbits.kernels.backends import build, cpu

# The smallest weights of Llama 3.2 1B and the largest of Llama 3.1 405B are named in the paper's text; the shapes
# between them are assumed.
SHAPES = ((2048, 512), (2048, 2048), (2048, 8192), (8192, 8192), (16384, 1024), (16384, 4096), (16384, 16384))
BITWISE, BOX_MULLER, TORCH = "bitwise", "box-muller", "torch"
CASES = {"generator": generate("gaussian"), "forward": sample_weight("gaussian")}
TITLES = {"generator": "generator alone", "forward": "w + R · 2^(1−b) · max|w|"}
PEER_ELEMENTS = 1 << 24  # eq. 3 in plain torch gets only this many elements: it needs ten times the matrix's memory


@dataclass(frozen=True)
class Timed:
    """The times of one generator for one shape: of the generator alone, or of the whole of eq. 3 with its noise."""

    rows: int
    cols: int
    what: str  # "generator" (alone), or "forward" (the whole of eq. 3)
    arm: str  # the name of the generator: bitwise, box-muller or torch
    elements: int  # the number of elements of one call
    seconds: list[float]  # the seconds of the call in each turn
    others: list[float | None]  # the share of the processors that other processes used in each turn

    @property
    def speed(self) -> float:
        """The number of elements per second, from the median of `seconds`."""
        return self.elements / median(self.seconds)


def time_shapes(shapes: Sequence[tuple[int, int]], device: str, runs: int) -> list[Timed]:
    keep_freed_memory()
    timings = []
    for rows, cols in shapes:
        print(f"fewbits: timing {rows}x{cols} in {runs} turns", file=sys.stderr, flush=True)
        w = torch.randn(rows, cols, device=device, generator=torch.Generator(device).manual_seed(0)).bfloat16()
        for what, case in CASES.items():
            generators = _generators(case, w)
            timers = [partial(seconds, partial(work, x), device) for work, x in generators.values()]
            others = OtherProcesses()
            times = take_turns(timers, runs, others=others)
            timings += [
                Timed(rows, cols, what, name, x.numel(), list_, others.shares)
                for (name, (_, x)), list_ in zip(generators.items(), times, strict=True)
            ]
    return timings


def _generators(case: Case, w: Tensor) -> dict[str, tuple[Work, Tensor]]:
    """Return a dictionary from each generator's name to the function to time and the tensor to pass to it.

    case: a value of CASES, for the generators alone or for the whole of eq. 3. w: the weight; if w is large,
    `torch` gets only its first rows for eq. 3. On a CPU, box-muller is absent for eq. 3, and without a C++ compiler.
    """
    few = w[: max(SQUARE, PEER_ELEMENTS // w.shape[1] // SQUARE * SQUARE)]
    generators: dict[str, tuple[Work, Tensor]] = {BITWISE: (case.call, w)}
    eager = peers.eager(case)
    if w.is_cuda:
        work = partial(peers.sample, draw=_box_muller, bits=BITS, square=SQUARE) if eager else _box_muller
        generators[BOX_MULLER] = torch.compile(work, dynamic=True), w
    elif eager is None and build.compiler():
        generators[BOX_MULLER] = (lambda x: cpu.box_muller(x.numel(), SEED)), w
    if eager:
        generators[TORCH] = eager, few
    else:
        normal = torch.zeros(w.shape, device=w.device)
        generators[TORCH] = (lambda _: normal.normal_()), w
    return generators


def _box_muller(like: Tensor) -> Tensor:
    """Return round(N(0, 1) / 2) as int8 in the shape of `like`, whose second dimension is even, by Box–Muller.

    Two uniform numbers give two normal ones, as in the paper.
    """
    half = (like.shape[0], like.shape[1] // 2, *like.shape[2:])
    u, v = (torch.rand(half, device=like.device) for _ in range(2))
    radius, angle = torch.sqrt(-2 * torch.log(1 - u)), 2 * math.pi * v
    z = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], 1)
    return (z / 2).round().to(torch.int8)


def show(timings: Sequence[Timed]) -> None:
    """Print two tables of speeds: for the generators alone, and for whole weight sampling (GaussWS eq. 3)."""
    arms = (BITWISE, BOX_MULLER, TORCH)
    for what, title in TITLES.items():
        speeds = {(t.rows, t.cols, t.arm): f"{t.speed / 1e9:.3g}" for t in timings if t.what == what}
        print(f"\n10⁹ elements/s, {title}:")
        shapes = dict.fromkeys((rows, cols) for rows, cols, _ in speeds)
        rows = ((f"{r}x{c}", *(speeds.get((r, c, arm), "-") for arm in arms)) for r, c in shapes)
        print_table(("shape", *arms), rows, right=arms)
