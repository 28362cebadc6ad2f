"""`fewbits bench sweep`: how well a sweep uses the machine, and what it costs beside the training."""

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

import pandas as pd

from fewbits.common.arguments import CommandParser
from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.sweep import load_sweeps
from fewbits.sweeps.running import store
from fewbits.sweeps.running.driver import Driver
from fewbits.sweeps.running.run_sweep import make_backend
from fewbits.sweeps.tracking.mlflow_view import Mirror

EXAMPLES = """\
examples:
  fewbits bench sweep                              20 trials of about 30 s, on Ray: some five minutes on two cores
  fewbits bench sweep --trials 8 --seconds 5 --backend local

Run it on a quiet machine: busy is all that its cores do.
"""
SWEEP = """\
words: [model=nemotron-nano, model.layers=2, data=synthetic, recipe=mor/block, training.batch=4, training.micro_batch=4,
  training.length=128, training.checkpoint_every=100000, evaluation.every=100000, evaluation.windows=4,
  schedule=constant, schedule.warmup_fraction=0]
"""
PILOT = 60  # steps of the trial that says how many make up a time
MANY = 500  # trials of the dry run


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits bench sweep", __doc__, EXAMPLES)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training in each (default: 30)")
    parser.add_argument("--backend", choices=("ray", "local"), default="ray")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fewbits-bench-") as folder:
        store, file = Path(folder) / "runs", Path(folder) / "bench.yaml"
        file.write_text(SWEEP)
        (file.parent / "many.yaml").write_text(SWEEP + f"seeds: [{', '.join(map(str, range(MANY)))}]\n")
        steps = max(2, round(PILOT * options.seconds / _pilot(file, store, options.backend)))
        words = [str(file), f"runtime.runs={store}", f"training.steps={steps}"]
        words.append(f"seeds=[{','.join(map(str, range(1, options.trials + 1)))}]")
        _measured(plan(*load_sweeps(words)), options.backend)
        print(f"{'the same, all done':34}{_command('sweep', *words):8.2f} s   (3)")
        _command("sweep", "--dry-run", str(file.parent / "many.yaml"), f"runtime.runs={store}")
        again = _command("sweep", "--dry-run", str(file.parent / "many.yaml"), f"runtime.runs={store}")
        print(f"{f'--dry-run of {MANY} trials':34}{again:8.2f} s   (5)")
    return 0


def _pilot(file: Path, store: Path, backend: str) -> float:
    """Seconds of training in PILOT steps, when every core has a trial."""
    cores = len(os.sched_getaffinity(0))
    seeds = ",".join(str(1000 + core) for core in range(cores))
    piloted = plan(*load_sweeps([str(file), f"runtime.runs={store}", f"training.steps={PILOT}", f"seeds=[{seeds}]"]))
    _run(piloted, backend)
    return sum(_training(piloted)) / cores


def _measured(measured: Plan, backend: str) -> None:
    wall, busy = _run(measured, backend)
    began = time.perf_counter()
    Mirror(measured).sync(last=True)
    mirrored = (time.perf_counter() - began) / len(measured.trials)
    cores, training = len(os.sched_getaffinity(0)), _training(measured)
    mean = sum(training) / len(training)
    print(f"{len(training)} trials of {mean:.1f} s of training, {cores} cores, {backend}; aims in brackets")
    print(f"{'cores busy':34}{busy / (cores * wall):8.3f}     (0.9)")
    print(f"{'training, over cores and wall time':34}{sum(training) / (cores * wall):8.3f}")
    print(f"{'a trial beside its training':34}{_between(measured) + mirrored:8.2f} s   (0.5)  MLflow's {mirrored:.2f}")


def _between(one: Plan) -> float:
    """Seconds from a trial's last step to the first one of the next in the same worker, on average."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for planned in one.trials.values():
        table = pd.read_parquet(planned.folder.path / "timing.parquet")
        worker = (planned.folder.path / store.LOG).read_text().partition("process ")[2].split()[0]
        first, last = table.iloc[0], table.iloc[-1]
        spans.setdefault(worker, []).append((first["time"] - first["seconds"], last["time"]))
    gaps = [after[0] - before[1] for trials in spans.values() for before, after in itertools.pairwise(sorted(trials))]
    return sum(gaps) / len(gaps) if gaps else math.nan


def _run(one: Plan, backend: str) -> tuple[float, float]:
    """Seconds of wall time, without the backend's start, and of work of all cores."""
    chosen = make_backend(backend, None, None)
    try:
        began, worked = time.perf_counter(), _worked()
        Driver(one, chosen).run()
        return time.perf_counter() - began, _worked() - worked
    finally:
        chosen.close()


def _training(one: Plan) -> list[float]:
    """Seconds of each trial's steps."""
    tables = (pd.read_parquet(planned.folder.path / "timing.parquet") for planned in one.trials.values())
    return [float(table["seconds"].sum()) for table in tables]


def _worked() -> float:
    """Seconds that the machine's cores have not been idle, since its boot."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _command(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "fewbits.cli", *words], check=True, capture_output=True)
    return time.perf_counter() - began
