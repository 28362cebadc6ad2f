"""Measure a sweep of short trials: the share of the cores' time that training takes, and the overhead per trial."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.sweep import load_sweeps
from fewbits.sweeps.running import store
from fewbits.sweeps.running.driver import Driver
from fewbits.sweeps.running.run_sweep import make_backend
from fewbits.sweeps.tracking.mirror import Mirror

SWEEP = """\
overrides: [model=nemotron-nano, model.layers=2, data=synthetic, recipe=mor/block, training.batch=4,
  training.micro_batch=4, training.length=128, training.checkpoint_every=100000, evaluation.every=100000,
  evaluation.windows=4, schedule=constant, schedule.warmup_fraction=0]
"""
PILOT = 60  # training steps of the pilot trials, whose speed determines how many steps take --seconds
MANY = 500  # the number of trials in the plan for which `--dry-run` is timed


def measure(trials: int, seconds: float, backend: str) -> None:
    """Run a sweep of `trials` trials with about `seconds` seconds of training each, and print the measurements.

    backend: `ray` or `local`.
    """
    with tempfile.TemporaryDirectory(prefix="fewbits-bench-") as folder:
        store, file = Path(folder) / "runs", Path(folder) / "bench.yaml"
        file.write_text(SWEEP)
        (file.parent / "many.yaml").write_text(SWEEP + f"seeds: [{', '.join(map(str, range(MANY)))}]\n")
        steps = max(2, round(PILOT * seconds / _pilot(file, store, backend)))
        overrides = [str(file), f"runtime.runs={store}", f"training.steps={steps}"]
        overrides.append(f"seeds=[{','.join(map(str, range(1, trials + 1)))}]")
        _measure(plan(*load_sweeps(overrides)), backend)
        print(f"{'sweep again, all trials done':34}{_command('sweep', *overrides):8.2f} s   (3)")
        _command("sweep", "--dry-run", str(file.parent / "many.yaml"), f"runtime.runs={store}")
        again = _command("sweep", "--dry-run", str(file.parent / "many.yaml"), f"runtime.runs={store}")
        print(f"{f'--dry-run of {MANY} trials':34}{again:8.2f} s   (5)")


def _pilot(file: Path, store: Path, backend: str) -> float:
    """Train one trial for each core at the same time, and return the mean time of a trial in seconds.

    A trial has PILOT steps. file: the sweep file. store: the store of the trials. backend: `ray` or `local`.
    """
    cores = len(os.sched_getaffinity(0))
    seeds = ",".join(str(1000 + core) for core in range(cores))
    pilot = plan(*load_sweeps([str(file), f"runtime.runs={store}", f"training.steps={PILOT}", f"seeds=[{seeds}]"]))
    _run(pilot, backend)
    return sum(_training(pilot)) / cores


def _measure(plan: Plan, backend: str) -> None:
    """Run the plan and print the measurements; a number in brackets is the target for the measurement beside it."""
    wall, busy = _run(plan, backend)
    began = time.perf_counter()
    Mirror(plan).sync(last=True)
    mirrored = (time.perf_counter() - began) / len(plan.trials)
    cores, training = len(os.sched_getaffinity(0)), _training(plan)
    mean = sum(training) / len(training)
    print(f"{len(training)} trials of {mean:.1f} s of training, {cores} cores, {backend}; targets in brackets")
    print(f"{'cores busy':34}{busy / (cores * wall):8.3f}     (0.9)")
    print(f"{'share of core time in training':34}{sum(training) / (cores * wall):8.3f}")
    print(f"{'overhead of a trial':34}{_between(plan) + mirrored:8.2f} s   (0.5)  MLflow's part {mirrored:.2f}")


def _between(plan: Plan) -> float:
    """Return the mean seconds from a trial's last step to the next trial's first step in the same worker process.

    NaN if no process has trained two trials.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for planned in plan.trials.values():
        table = pd.read_parquet(planned.folder.path / "timing.parquet")
        worker = (planned.folder.path / store.LOG).read_text().partition("process ")[2].split()[0]
        first, last = table.iloc[0], table.iloc[-1]
        spans.setdefault(worker, []).append((first["time"] - first["seconds"], last["time"]))
    gaps = [after[0] - before[1] for trials in spans.values() for before, after in itertools.pairwise(sorted(trials))]
    return sum(gaps) / len(gaps) if gaps else math.nan


def _run(plan: Plan, backend: str) -> tuple[float, float]:
    """Run the plan; return the seconds from the backend's start to the end, and all cores' busy seconds meanwhile."""
    chosen = make_backend(backend, None, None)
    try:
        began, busy = time.perf_counter(), _busy_seconds()
        Driver(plan, chosen).run()
        return time.perf_counter() - began, _busy_seconds() - busy
    finally:
        chosen.close()


def _training(plan: Plan) -> list[float]:
    """Return for each trial the sum of the seconds of its training steps."""
    tables = (pd.read_parquet(planned.folder.path / "timing.parquet") for planned in plan.trials.values())
    return [float(table["seconds"].sum()) for table in tables]


def _busy_seconds() -> float:
    """Return the sum over the machine's cores of the seconds since boot in which the core was not idle."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _command(*arguments: str) -> float:
    """Run a fewbits command and return how many seconds it took."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "fewbits.cli", *arguments], check=True, capture_output=True)
    return time.perf_counter() - began
