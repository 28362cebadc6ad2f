"""Test how many trials the backend `local` runs at a time on this machine."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fewbits.sweeps.running.driver import job
from fewbits.sweeps.running.local import Local
from tests.sweeps.sweep_inputs import planned, tiny_file

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("parallel", "cpus", "limit"),
    [(1, 0.01, 1), (2, 0.01, 2), (None, float(CORES), 1), (3, float(CORES), 1)],
)
def test_trials_run_as_parallel_says_and_the_cores_allow(
    cache: Path, tmp_path: Path, parallel: int | None, cpus: float, limit: int
) -> None:
    """Start trials as long as there is room.

    parallel: the largest number of trials at a time. cpus: the cores that a trial needs. limit: the expected number.
    """
    file = tiny_file(tmp_path, cache, {"seeds": [0, 1, 2], "arms": {"bf16": {"overrides": ["recipe=bf16"]}}})
    trials = [*planned(file, f"runtime.runs={tmp_path / 'runs'}").trials.values()]
    resources = replace(trials[0].resources, cpus=cpus)
    backend, running = Local(parallel), 0
    try:
        for trial in trials:
            if backend.room(resources):
                backend.start(job(trial), resources)
                running += 1
    finally:
        backend.close()
    assert running == limit
