"""Provide the measurements of the benchmarks: times of calls that take turns, their ratios, and peak memory.

Calls that are compared take turns, A B A B …, and ratios are computed within a turn. So if the speed of the machine
changes (other programs, clock rates), both calls of a turn change alike, and the ratio stays.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Call = Callable[[], object]
Timer = Callable[[], float]  # makes the measured call once and returns its seconds

PATIENCE = 5.0  # seconds for the turns of one case, if a call or the machine is very slow
BURST, BURST_PATIENCE = 12, 0.03  # the most calls of a burst, and the seconds after which no further call starts
BUSY_CYCLES = 40_000_000  # about 20 ms, in which the host queues the GPU's work


def warn_if_busy() -> None:
    """Print a warning on stderr if other programs use this machine."""
    if warning := busy(os.getloadavg()[0], os.cpu_count() or 1):
        print(f"fewbits: {warning}", file=sys.stderr)


def busy(load: float, cores: int) -> str | None:
    """Return a warning if the load average exceeds the number of cores by more than a quarter, else None."""
    if load <= 1.25 * cores:
        return None
    return f"this machine is busy (load {load:.1f}, cores {cores}): timings are unreliable"


@dataclass(frozen=True)
class Ratio:
    """The median and the range of ratios."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(numerators: Sequence[float], denominators: Sequence[float]) -> "Ratio":
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        return Ratio(median(ratios), min(ratios), max(ratios))


def seconds(call: Call, device: str = "cpu") -> float:
    """Return the seconds that a call and the work that it queues on a GPU take, without freeing the result."""
    start = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    stop = time.perf_counter()
    del result
    return stop - start


def gpu_seconds(call: Call) -> float:
    """Return the seconds of a call's work on the GPU, without those of the host.

    The GPU is kept busy before the first event, so that the host has queued everything when the timer starts.
    """
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    result = call()
    stop.record()
    stop.synchronize()
    del result
    return start.elapsed_time(stop) / 1e3


def burst_seconds(call: Call) -> float:
    """Return the seconds of the fastest of several calls in a row; the first one brings the tensors into the caches."""
    call()
    times = [seconds(call)]
    while len(times) < BURST and sum(times) < BURST_PATIENCE:
        times.append(seconds(call))
    return min(times)


def take_turns(
    timers: Sequence[Timer], runs: int, *, untimed: int = 1, patience: float = PATIENCE
) -> list[list[float]]:
    """Return a list of seconds for each timer, one for each of `runs` turns, after some turns that are not recorded.

    No turn starts after `patience` seconds, except the first.
    """
    for _ in range(untimed):
        for timer in timers:
            timer()
    start = time.perf_counter()
    turns: list[list[float]] = []
    while not turns or (len(turns) < runs and time.perf_counter() - start < patience):
        turns.append([timer() for timer in timers])
    return [list(times) for times in zip(*turns, strict=True)]


def seconds_per_element(small: float, double: float, elements: int, in_memory: float) -> float | None:
    """Return the seconds per element in the caches, from the times of two tensors that differ by `elements`.

    The difference of the times does not contain the fixed cost of a call (dispatch, waking threads). The result is None
    if the times are implausible because other programs interfered: if the doubled tensor does not take between one and
    two times as long as the small one, or an element takes much longer than in the large tensor (`in_memory` seconds).
    """
    each = (double - small) / elements
    plausible = 0.45 * double < small < 0.9 * double and each < 1.3 * in_memory
    return each if plausible else None


# ------------------------------------------------------------------------------------------------ memory


class TouchedMemory(TorchFunctionMode):
    """A torch mode in which torch.empty and torch.empty_like return memory that was written before.

    Each entry of the mode returns the same memory, so a call without out= can be timed like one with out=. A result is
    valid until the mode is entered again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self._count = 0

    def __enter__(self) -> "TouchedMemory":
        self._count = 0
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.empty, torch.empty_like):
            return result
        self._count += 1
        key = (self._count, result.shape, result.dtype)
        return self._kept[key] if key in self._kept else self._kept.setdefault(key, result.zero_())


def in_touched_memory(call: Callable[..., object]) -> Callable[..., object]:
    """Return a function that makes the call with its results in memory that was written before and is used again."""
    memory = TouchedMemory()

    def inside(*arguments: Tensor) -> object:
        with memory:
            return call(*arguments)

    return inside


def peak_memory(call: Call) -> int | None:
    """Return the largest growth of the process in bytes during a call, less the bytes of the tensors that it returns.

    Linux records the peak (VmHWM) and resets it on request; on other systems the result is None. Make the call once
    before, because a first call also loads code.
    """
    try:
        ctypes.CDLL(None).malloc_trim(
            0
        )  # gives freed memory back to the system; otherwise the call would use it without growing the process
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    before = _peak()
    result = call()
    return max(0, _peak() - before - _bytes(result))


def _bytes(result: object) -> int:
    if isinstance(result, Tensor):
        return result.nbytes
    return sum(map(_bytes, result)) if isinstance(result, (tuple, list)) else 0


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
