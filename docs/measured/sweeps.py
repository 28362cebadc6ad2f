"""Measure how busy a sweep keeps the cores, and the time that it adds to a training (results: docs/measured/sweeps.md).

    python docs/measured/sweeps.py                          # 20 trials of about 30 s, on Ray: five minutes on two cores
    python docs/measured/sweeps.py --trials 8 --seconds 5 --backend local

Run it on a machine that does nothing else: work of other programs counts as work of the sweep. A number in brackets is
the target for the number before it.
"""

import argparse
import itertools
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.plan import plan as make_plan
from fewbits.sweeps.planning.studies import load_sweeps
from fewbits.sweeps.running.driver import Driver
from fewbits.sweeps.running.run_sweep import Where
from fewbits.sweeps.tracking.mirror import Mirror

SWEEP_FILE = """\
overrides: [model=nemotron-nano, model.layers=2, data=synthetic, recipe=mor/block, training.batch=4,
  training.micro_batch=4, training.length=128, training.checkpoint_every=100000, evaluation.every=100000,
  evaluation.windows=4, schedule=constant, schedule.warmup_fraction=0]
"""
PILOT = 60  # training steps of the pilot trials, whose speed determines how many steps take --seconds


def measure(folder: Path, trials: int, seconds: float, backend: str) -> None:
    cores = len(os.sched_getaffinity(0))
    pilot = planned(folder, PILOT, range(1000, 1000 + cores))  # one trial for each core at the same time
    run(pilot, backend)
    plan = planned(folder, max(2, round(PILOT * seconds * cores / training_seconds(pilot))), range(1, trials + 1))
    wall, busy = run(plan, backend)
    began = time.perf_counter()
    Mirror(plan).sync(last=True)
    mirrored, training = (time.perf_counter() - began) / trials, training_seconds(plan)
    print(f"{trials} trials of {training / trials:.1f} s of training, {cores} cores, {backend}; targets in brackets")
    print(f"{'cores busy':34}{busy / (cores * wall):8.3f}     (0.9)")
    print(f"{'share of core time in training':34}{training / (cores * wall):8.3f}")
    print(f"{'overhead of a trial':34}{between(plan) + mirrored:8.2f} s   (0.5)  MLflow's part {mirrored:.2f}")


def planned(folder: Path, steps: int, seeds: Sequence[int]) -> Plan:
    file = folder / "bench.yaml"
    file.write_text(SWEEP_FILE)
    values = [f"runtime.runs={folder / 'runs'}", f"training.steps={steps}", f"seeds=[{','.join(map(str, seeds))}]"]
    return make_plan(*load_sweeps([str(file), *values]))


def between(plan: Plan) -> float:
    """Return the mean seconds from a trial's last step to the next trial's first step in the same worker process.

    NaN if no process has trained two trials.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for planned in plan.trials.values():
        table = pd.read_parquet(planned.folder.path / "timing.parquet")
        worker = (planned.folder.path / "log.txt").read_text().partition("process ")[2].split()[0]
        first, last = table.iloc[0], table.iloc[-1]
        spans.setdefault(worker, []).append((first["time"] - first["seconds"], last["time"]))
    gaps = [after[0] - before[1] for trials in spans.values() for before, after in itertools.pairwise(sorted(trials))]
    return sum(gaps) / len(gaps) if gaps else math.nan


def run(plan: Plan, backend: str) -> tuple[float, float]:
    """Run the plan; return the seconds from the backend's start to the end, and all cores' busy seconds meanwhile."""
    chosen = Where(backend).open()
    try:
        began, busy = time.perf_counter(), busy_seconds()
        Driver(plan, chosen).run()
        return time.perf_counter() - began, busy_seconds() - busy
    finally:
        chosen.close()


def training_seconds(plan: Plan) -> float:
    """Return the sum of the seconds of all training steps."""
    tables = (pd.read_parquet(planned.folder.path / "timing.parquet") for planned in plan.trials.values())
    return sum(float(table["seconds"].sum()) for table in tables)


def busy_seconds() -> float:
    """Return the sum over the machine's cores of the seconds since boot in which the core was not idle."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="trials of the sweep (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of training in each trial (default: 30)")
    parser.add_argument("--backend", choices=("ray", "local"), default="ray", help="what runs the trials")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fewbits-bench-") as folder:
        measure(Path(folder), options.trials, options.seconds, options.backend)
