"""Test the measurement of the processor time that other processes use while calls are timed."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fewbits.kernels.bench.measure import SHORTEST, OtherProcesses, take_turns

SPIN = "while True: pass"


def spin(seconds: float = 0.2) -> float:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the kernel does not count processor time there")
def test_other_processes_are_measured_and_our_own_work_is_not() -> None:
    """Start processes that use at least half of the machine (more if other programs run), and check their share."""
    alone, beside = OtherProcesses(), OtherProcesses()
    take_turns([spin], 3, patience=math.inf, others=alone)
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(-(-(os.cpu_count() or 1) // 2))]
    try:
        beside = OtherProcesses()
        take_turns([spin], 3, patience=math.inf, others=beside)
    finally:
        for one in others:
            one.kill()
            one.wait()
    assert len(alone.shares) == len(beside.shares) == 3
    assert all(share is not None and 0 <= share <= 1 for share in (*alone.shares, *beside.shares))
    assert max(share or 0 for share in beside.shares) > 0.3


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the kernel does not count processor time there")
def test_turns_too_short_to_measure_have_the_share_of_the_time_before() -> None:
    start = time.perf_counter()
    others = OtherProcesses()
    take_turns([lambda: 0.0], 5, others=others)
    assert time.perf_counter() - start >= 0.8 * SHORTEST  # in ticks of 10 ms
    assert len(others.shares) == 5
    assert len(set(others.shares)) == 1
