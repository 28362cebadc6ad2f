"""Measure for the benchmark: seconds, a call beside the copy, seconds per element in the caches, peak memory.

Calls that are compared take turns, A B A B …, and ratios are taken within a turn. The machine's speed drifts (other
programs, clock rates), and a drift that affects both calls cancels. The module does not depend on what is measured.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Call = Callable[[], object]

PATIENCE = 5.0  # seconds for the turns of one case, if a call or the machine is very slow
BURST, BURST_PATIENCE = 12, 0.03  # calls in a row on a tensor in the caches, or as many as start within these seconds


def busy(load: float, cores: int) -> str | None:
    """Return a warning if the load exceeds the cores of this machine, else None."""
    if load <= 1.25 * cores:
        return None
    return f"this machine is busy (load {load:.1f}, cores {cores}): timings are unreliable"


@dataclass(frozen=True)
class Ratio:
    """The median and the range of some ratios."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(numerators: Sequence[float], denominators: Sequence[float]) -> "Ratio":
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        return Ratio(median(ratios), min(ratios), max(ratios))


def seconds(call: Call) -> float:
    """Return the seconds of one call; its result is freed after the timer has stopped."""
    start = time.perf_counter()
    result = call()
    stop = time.perf_counter()
    del result
    return stop - start


def take_turns(calls: Sequence[Call], runs: int) -> list[list[float]]:
    """Return the seconds of each call in each turn, after an untimed first turn."""
    return _turns(lambda: [seconds(call) for call in calls], runs)


def beside_cache(copy: Call, call: Call, small: Call, double: Call, runs: int) -> list[list[float]]:
    """Return the seconds of copy, of call, and of the best of several calls on two tensors that fit in the caches.

    One of these tensors is double the other. The difference is time per element without the fixed cost of a call
    (dispatch, waking threads).
    """
    return _turns(lambda: [seconds(copy), seconds(call), _burst(small), _burst(double)], runs)


def _turns(turn: Callable[[], list[float]], runs: int) -> list[list[float]]:
    """Run `runs` turns, or as many as end within PATIENCE seconds, but at least one."""
    turn()
    start, turns = time.perf_counter(), [turn()]
    while len(turns) < runs and time.perf_counter() - start < PATIENCE:
        turns.append(turn())
    return [list(times) for times in zip(*turns, strict=True)]


def _burst(call: Call) -> float:
    call()  # loads the tensor into the caches
    times = [seconds(call)]
    while len(times) < BURST and sum(times) < BURST_PATIENCE:
        times.append(seconds(call))
    return min(times)


def seconds_per_element(small: float, double: float, elements: int, in_memory: float) -> float | None:
    """Return the seconds per element in the caches, from two tensors that differ by `elements`.

    None if other programs interfered: then twice the elements do not take between one and two times as long, or an
    element takes much longer than one of the large tensor, `in_memory`.
    """
    each = (double - small) / elements
    plausible = 0.45 * double < small < 0.9 * double and each < 1.3 * in_memory
    return each if plausible else None


# ------------------------------------------------------------------------------------------------ memory


class TouchedMemory(TorchFunctionMode):
    """A mode in which torch.empty and torch.empty_like return memory that was written before, reused at every entry.

    So a call without out= can be timed like one with it. A result is valid until the mode is entered again.
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


def trim() -> None:
    """Return freed memory to the operating system, if the C library can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return


def peak_memory(call: Call) -> int | None:
    """Return the bytes by which a call grew the process at most, less the tensors it returned; None without Linux.

    The kernel records the peak (VmHWM) and resets it on request. If it does not allow that, a thread samples every half
    millisecond. Run the call once before, because a first call also loads code.
    """
    if not Path("/proc/self/statm").exists():
        return None
    trim()
    if _reset_peak():
        before = _peak()
        result = call()
        grown = _peak() - before
    else:
        with _sampling() as resident:
            result = call()
        grown = max(resident) - resident[0]
    return max(0, grown - _bytes(result))


def _bytes(result: object) -> int:
    if isinstance(result, Tensor):
        return result.nbytes
    return sum(map(_bytes, result)) if isinstance(result, (tuple, list)) else 0


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _sampling() -> Iterator[list[int]]:
    resident, done = [_resident()], threading.Event()

    def sample() -> None:
        while not done.wait(0.0005):
            resident.append(_resident())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield resident
    finally:
        resident.append(_resident())
        done.set()
        thread.join()
