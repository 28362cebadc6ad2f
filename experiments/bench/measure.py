"""Provide the measurements of the benchmarks: times of calls that take turns, and their ratios.

Calls that are compared take turns, A B A B …, and ratios are computed within a turn. So if the machine becomes slower,
both calls of a turn become slower, and the ratio stays.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from fewbits.common.terminal import notice
from fewbits.experiments.environment import environment
from fewbits.version import __version__

Call = Callable[[], object]
Timer = Callable[[], float]  # makes the measured call once and returns its seconds

PATIENCE = 5.0  # seconds after which no further turn of a case starts
SHORTEST = 0.25  # the shortest time, in seconds, over which the processor time of other processes is measured
BUSY_CYCLES = 40_000_000  # cycles for which the GPU is kept busy, about 20 ms, while the host queues the call


def machine(device: str) -> dict[str, str | int | float | None]:
    """Return facts about this machine, its load average and its software."""
    facts = environment(torch.device(device))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    return {
        **{key: facts[key] for key in ("processor", "python", "torch", "compiler", "backend")},
        "cores": cores,
        "threads": torch.get_num_threads(),
        "device": facts["gpu"] or f"{facts['processor']}, {torch.get_num_threads()} of {cores} cores",
        "load": round(os.getloadavg()[0], 1),
        "fewbits": __version__,
    }


def warn_if_busy() -> None:
    """Print a warning on stderr if this machine's load average exceeds its number of cores by more than a quarter."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 1.25 * cores:
        notice(f"this machine is busy (load {load:.1f}, cores {cores}): timings are unreliable")


@dataclass(frozen=True)
class Ratio:
    """The median, minimum and maximum over all turns of the ratio of two times that were measured in the same turn."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(numerators: Sequence[float], denominators: Sequence[float]) -> "Ratio":
        ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
        return Ratio(median(ratios), min(ratios), max(ratios))


def seconds(call: Call, device: str = "cpu") -> float:
    """Return the seconds that a call takes, including its work on a GPU, but not the time to free its result."""
    start = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    stop = time.perf_counter()
    del result
    return stop - start


def gpu_seconds(call: Call) -> float:
    """Return the seconds of a call's work on the GPU, without those of the host.

    The GPU is kept busy first, so that the host has queued the whole call before the GPU's timer starts.
    """
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(BUSY_CYCLES)
    start.record()
    result = call()
    stop.record()
    stop.synchronize()
    del result
    return start.elapsed_time(stop) / 1e3


class OtherProcesses:
    """The share of the machine's processor time that other processes used in each turn of the timed calls.

    Linux counts processor time in ticks of 10 ms, so the share is measured only over `SHORTEST` seconds or more, first
    while this process sleeps. A shorter turn gets the latest share. The share is None where /proc/stat does not exist.
    """

    def __init__(self) -> None:
        self.shares: list[float | None] = []
        self._share: float | None = None
        self._last = _processor_seconds()
        time.sleep(1.2 * SHORTEST)
        self._measure()

    def record(self) -> None:
        """Append to `shares` the share of processor time that other processes used in the turn that has just ended."""
        self._measure()
        self.shares.append(self._share)

    def _measure(self) -> None:
        now = _processor_seconds()
        if now is None or self._last is None:
            return
        whole, busy, own = (after - before for after, before in zip(now, self._last, strict=True))
        if whole >= SHORTEST * (os.cpu_count() or 1):
            self._share = min(1.0, max(0.0, busy - own) / whole)
            self._last = now


def _processor_seconds() -> tuple[float, float, float] | None:
    """Return the processors' seconds so far: all, busy, and this process's and its children's; None without /proc."""
    try:
        ticks = [int(count) for count in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    each = os.sysconf("SC_CLK_TCK")
    return sum(ticks) / each, (sum(ticks) - ticks[3] - ticks[4]) / each, sum(os.times()[:4])  # 3: idle, 4: waiting


def take_turns(
    timers: Sequence[Timer],
    runs: int,
    *,
    untimed: int = 1,
    patience: float = PATIENCE,
    others: OtherProcesses | None = None,
) -> list[list[float]]:
    """Call all timers once in each turn. Return a list for each timer, with its seconds in each recorded turn.

    The first `untimed` turns are not recorded. Then up to `runs` turns are: after `patience` seconds no further turn
    starts, but at least one is recorded. others: records the share of other processes in each turn.
    """
    for _ in range(untimed):
        for timer in timers:
            timer()
    start = time.perf_counter()
    turns: list[list[float]] = []
    while not turns or (len(turns) < runs and time.perf_counter() - start < patience):
        turns.append([timer() for timer in timers])
        if others is not None:
            others.record()
    return [list(times) for times in zip(*turns, strict=True)]


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory of any size, because the system provides new memory only at the first write."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_max = -1, -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, (1 << 31) - 1)
