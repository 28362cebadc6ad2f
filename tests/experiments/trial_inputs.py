"""What tests of trials share: a tiny trial by words of the command line, run here or in a process of its own, and the
bytes that it leaves.

Processes are forked from a server that has imported torch once, so a test may start and kill as many as it likes.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors.torch import load_file
from torch import Tensor

from fewbits import cli
from fewbits.experiments.config import load_trial
from fewbits.experiments.runs import checkpoints
from fewbits.experiments.runs.run_folder import RunFolder
from fewbits.experiments.tracking.tracker import Tracker
from fewbits.experiments.training import Progress, Say, run

# A quarter of the -nano models' width: a step takes a tenth of a second, even where torch has only scalar loops for
# BF16. Blocks of 16 and 32 still divide every operand into several.
TINY = {
    "model.layers": 2,
    "model.width": 64,
    "model.heads": 2,
    "model.kv_heads": 2,
    "model.head_dim": 32,
    "model.ffn": 128,
    "data": "synthetic",
    "data.size": 65536,
    "data.repeat": 1000,  # some tests need trials that do not end by themselves
    "training.steps": 12,
    "training.batch": 4,
    "training.micro_batch": 2,
    "training.length": 128,
    "training.checkpoint_every": 3,
    "evaluation.every": 5,
    "evaluation.windows": 4,
    "observer.window": 5,
    "observer.every": 2,
    "observer.gradients_every": 4,
    "schedule": "constant",
    "schedule.warmup_fraction": 0,
}
# Several blocks to every operand of a tiny model, as 128x128 gives the papers' own.
MOR = ("recipe=mor/block", "recipe.block=32x32")
GAUSSWS_MOR = ("recipe=gaussws-mor", "recipe.block=32x32")
FILES = ("metrics.parquet", "numerics.parquet", "result.json")


def words(cache: Path, runs: Path, *more: str) -> list[str]:
    """The command line of a tiny trial; what is said in `more` replaces what is said here."""
    settings = TINY | {"runtime.device": "cpu", "runtime.cache": cache, "runtime.runs": runs}
    said = {word.partition("=")[0] for word in more}
    return [*(f"{key}={value}" for key, value in settings.items() if key not in said), *more]


def train(cache: Path, runs: Path, *more: str, say: Say = lambda _: None) -> tuple[RunFolder, dict[str, Any]]:
    trial, runtime = load_trial(words(cache, runs, *more))
    return run(trial, runtime, say, saved=Tracker(runtime))


class Interrupted(BaseException):
    """What a trial dies of in `train_until`; nothing in it may catch it."""


def train_until(step: int, cache: Path, runs: Path, *more: str) -> None:
    """Train and break off after a step, before its checkpoint."""

    def say(progress: Progress) -> None:
        if progress.step == step:
            raise Interrupted

    with contextlib.suppress(Interrupted):
        train(cache, runs, *more, say=say)
        raise AssertionError(f"the trial ended before step {step}")


def left(folder: Path) -> dict[str, bytes]:
    """The bytes that a finished trial promises to be the same each time."""
    return {name: (folder / name).read_bytes() for name in FILES} | {"tensors": _newest(folder).read_bytes()}


def only_run(runs: Path) -> Path:
    (folder,) = runs.iterdir()
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    """Of the last checkpoint."""
    return load_file(_newest(folder))


def metric(folder: RunFolder | Path, name: str) -> list[float]:
    path = folder.path if isinstance(folder, RunFolder) else folder
    return list(pd.read_parquet(path / "metrics.parquet")[name])


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if ".partial" in path.name]


def _newest(folder: Path) -> Path:
    found = checkpoints.newest(folder / "checkpoints")
    assert found is not None
    return found.path / checkpoints.TENSORS


# ------------------------------------------------------------------------------------------------ other processes


def _main(argv: list[str], output: str, environment: Mapping[str, str], file_size: int | None, leads: bool) -> None:
    """In the new process: `fewbits …` as the command line runs it, both streams into one file or terminal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if leads:
        os.setsid()
    os.environ.update(environment)
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    if file_size is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
    status = cli.main(argv)
    sys.stdout.flush()
    os._exit(status)


def started(
    argv: list[str],
    output: Path,
    *,
    environment: Mapping[str, str] | None = None,
    file_size: int | None = None,
    leads: bool = False,
) -> ForkServerProcess:
    """`fewbits ARGV` in a process of its own. leads: a process group, to be killed by who started it."""
    arguments = (argv, str(output), dict(environment or {}), file_size, leads)
    process = server().Process(target=_main, args=arguments, daemon=not leads)  # who is a daemon has no children
    process.start()
    return process


@functools.cache
def server() -> multiprocessing.context.ForkServerContext:
    """The local backend's too, of sweeps that run in this process."""
    context = multiprocessing.get_context("forkserver")
    costly = ["mlflow", "mlflow.store.tracking.sqlalchemy_store", "torch._dynamo"]  # the last one for several ranks
    context.set_forkserver_preload(
        ["fewbits.sweeps.running.preload", "fewbits.sweeps.running.run_sweep", *costly, __name__]
    )
    first = context.Process(target=os.getpid, daemon=True)
    first.start()
    first.join()
    return context


def ended(process: ForkServerProcess, timeout: float = 120) -> int:
    """Its exit status; minus the signal where one ended it."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"the process did not end within {timeout} s")
    return process.exitcode


@contextlib.contextmanager
def ending(process: ForkServerProcess) -> Iterator[ForkServerProcess]:
    """Whatever happens in the block, the process is gone after it."""
    try:
        yield process
    finally:
        process.kill()
        process.join()
