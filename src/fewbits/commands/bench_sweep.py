"""Measure how busy a sweep keeps the machine's cores, and the time it adds to each training (`fewbits bench sweep`)."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fewbits.common.arguments import CommandParser, positive

if TYPE_CHECKING:
    from fewbits.sweeps.planning.plan import Plan

EXAMPLES = """\
examples:
  fewbits bench sweep                              20 trials of about 30 s, on Ray: about five minutes on two cores
  fewbits bench sweep --trials 8 --seconds 5 --backend local

Run it on a machine that does nothing else: work of other programs counts as work of the sweep.
"""
SWEEP = """\
overrides: [model=nemotron-nano, model.layers=2, data=synthetic, recipe=mor/block, training.batch=4,
  training.micro_batch=4, training.length=128, training.checkpoint_every=100000, evaluation.every=100000,
  evaluation.windows=4, schedule=constant, schedule.warmup_fraction=0]
"""
PILOT = 60  # training steps of the pilot trials, whose speed determines how many steps take --seconds
MANY = 500  # the number of trials in the plan for which `--dry-run` is timed


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits bench sweep", __doc__, EXAMPLES)
    parser.add_argument("--trials", type=positive, default=20, help="trials of the sweep (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of training in each trial (default: 30)")
    parser.add_argument(
        "--backend", choices=("ray", "local"), default="ray", help="what runs the trials (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fewbits-bench-") as folder:
        _measure(Path(folder), options.trials, options.seconds, options.backend)
    return 0


def _measure(folder: Path, trials: int, seconds: float, backend: str) -> None:
    """Run a sweep in a folder and print the measurements; a number in brackets is the target for that beside it."""
    from fewbits.sweeps.tracking.mirror import Mirror

    file, many, cores = folder / "bench.yaml", folder / "many.yaml", len(os.sched_getaffinity(0))
    file.write_text(SWEEP)
    many.write_text(SWEEP + f"seeds: [{', '.join(map(str, range(MANY)))}]\n")
    pilot = _plan(_overrides(file, PILOT, range(1000, 1000 + cores)))  # one trial for each core at the same time
    _run(pilot, backend)
    steps = max(2, round(PILOT * seconds * cores / sum(_training(pilot))))
    overrides = _overrides(file, steps, range(1, trials + 1))
    plan = _plan(overrides)
    wall, busy = _run(plan, backend)
    began = time.perf_counter()
    Mirror(plan).sync(last=True)
    mirrored, training = (time.perf_counter() - began) / trials, _training(plan)
    print(
        f"{trials} trials of {sum(training) / trials:.1f} s of training, {cores} cores, {backend}; targets in brackets"
    )
    print(f"{'cores busy':34}{busy / (cores * wall):8.3f}     (0.9)")
    print(f"{'share of core time in training':34}{sum(training) / (cores * wall):8.3f}")
    print(f"{'overhead of a trial':34}{_between(plan) + mirrored:8.2f} s   (0.5)  MLflow's part {mirrored:.2f}")
    print(f"{'sweep again, all trials done':34}{_command('sweep', *overrides):8.2f} s   (3)")
    dry = ("sweep", "--dry-run", str(many), f"runtime.runs={folder / 'runs'}")
    _command(*dry)
    print(f"{f'--dry-run of {MANY} trials':34}{_command(*dry):8.2f} s   (5)")


def _overrides(file: Path, steps: int, seeds: Sequence[int]) -> list[str]:
    runs = f"runtime.runs={file.parent / 'runs'}"
    return [str(file), runs, f"training.steps={steps}", f"seeds=[{','.join(map(str, seeds))}]"]


def _plan(overrides: Sequence[str]) -> Plan:
    from fewbits.sweeps.planning.plan import plan
    from fewbits.sweeps.planning.studies import load_sweeps

    return plan(*load_sweeps(overrides))


def _between(plan: Plan) -> float:
    """Return the mean seconds from a trial's last step to the next trial's first step in the same worker process.

    NaN if no process has trained two trials.
    """
    import pandas as pd

    spans: dict[str, list[tuple[float, float]]] = {}
    for planned in plan.trials.values():
        table = pd.read_parquet(planned.folder.path / "timing.parquet")
        worker = (planned.folder.path / "log.txt").read_text().partition("process ")[2].split()[0]
        first, last = table.iloc[0], table.iloc[-1]
        spans.setdefault(worker, []).append((first["time"] - first["seconds"], last["time"]))
    gaps = [after[0] - before[1] for trials in spans.values() for before, after in itertools.pairwise(sorted(trials))]
    return sum(gaps) / len(gaps) if gaps else math.nan


def _run(plan: Plan, backend: str) -> tuple[float, float]:
    """Run the plan; return the seconds from the backend's start to the end, and all cores' busy seconds meanwhile."""
    from fewbits.sweeps.running.driver import Driver
    from fewbits.sweeps.running.run_sweep import Where

    chosen = Where(backend).open()
    try:
        began, busy = time.perf_counter(), _busy_seconds()
        Driver(plan, chosen).run()
        return time.perf_counter() - began, _busy_seconds() - busy
    finally:
        chosen.close()


def _training(plan: Plan) -> list[float]:
    """Return for each trial the sum of the seconds of its training steps."""
    import pandas as pd

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
