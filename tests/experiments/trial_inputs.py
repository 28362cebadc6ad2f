"""Train tiny trials for tests, in this process or in another one, and read what they write.

Processes are forked from a server that has imported torch once, so that a test can start and kill many of them.
"""

import contextlib
import functools
import itertools
import json
import multiprocessing
import multiprocessing.util
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from fewbits import cli
from fewbits.experiments.config import load_trial
from fewbits.experiments.session import Events, Progress
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.training import run
from fewbits.sweeps.tracking.mirror import Tracker

# A quarter of the -nano models' width: a step takes 0.1 s, even on processors where torch has only scalar loops for
# BF16. Every operand still has several blocks of side 16 and of side 32.
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
# Every operand of a tiny model has several blocks of 32x32, as every operand of MoR's models has several of 128x128.
MOR = ("recipe=mor/block", "recipe.block=32x32")
GAUSSWS_MOR = ("recipe=gaussws-mor", "recipe.block=32x32")
FILES = ("metrics.parquet", "numerics.parquet", "result.json")


def overrides(cache: Path, runs: Path, *more: str) -> list[str]:
    """Return the overrides of a tiny trial; overrides in `more` replace the defaults for the same keys."""
    settings = TINY | {"runtime.device": "cpu", "runtime.cache": cache, "runtime.runs": runs}
    replaced = {override.partition("=")[0] for override in more}
    return [*(f"{key}={value}" for key, value in settings.items() if key not in replaced), *more]


Say = Callable[[Progress], None]


class Reporter(Events):
    """Calls `say` after every step, and `saved` each time something was written."""

    def __init__(self, say: Say, saved: Callable[[RunFolder], None] = lambda _: None) -> None:
        self.step, self.saved = say, saved  # type: ignore[method-assign, assignment]


def train(cache: Path, runs: Path, *more: str, say: Say = lambda _: None) -> tuple[RunFolder, dict[str, Any]]:
    """Train a tiny trial with the overrides `more` in this process; return its run folder and its result."""
    trial, runtime = load_trial(overrides(cache, runs, *more))
    return run(trial, runtime, Reporter(say, Tracker(runtime).saved))


class Interrupted(BaseException):
    """The exception with which `train_until` interrupts a trial; nothing else catches it."""


def train_until(step: int, cache: Path, runs: Path, *more: str) -> None:
    """Train a tiny trial, and interrupt it after this step, before the step's checkpoint is written."""

    def say(progress: Progress) -> None:
        if progress.step == step:
            raise Interrupted

    with contextlib.suppress(Interrupted):
        train(cache, runs, *more, say=say)
        raise AssertionError(f"the trial ended before step {step}")


def left(folder: Path) -> dict[str, bytes]:
    """Return, by name, the bytes of the files that are equal each time a trial is run: tables, result, checkpoint."""
    tables = {path.name: path.read_bytes() for path in folder.glob("precision.parquet")}  # only some trials have it
    newest = _newest(folder)
    shards = {name: (newest.path / name).read_bytes() for name in newest.files}
    return tables | {name: (folder / name).read_bytes() for name in FILES} | shards


def only_run(runs: Path) -> Path:
    (folder,) = runs.iterdir()
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a run folder's last checkpoint, by name."""
    return _newest(folder).tensors()


def metric(folder: RunFolder | Path, name: str) -> list[float]:
    path = folder.path if isinstance(folder, RunFolder) else folder
    return list(pd.read_parquet(path / "metrics.parquet")[name])


def result_of(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if ".partial" in path.name]


def _newest(folder: Path) -> checkpoints.Checkpoint:
    newest = checkpoints.newest(folder / "checkpoints")
    assert newest is not None
    return newest


# ------------------------------------------------------------------------------------------------ other processes


def _main(
    argv: list[str],
    output: Path | None,
    environment: Mapping[str, str],
    file_size: int | None,
    leads: bool,
    folder: Path | None,
    forks: bool,
) -> None:
    """Run `fewbits ARGV` in this new process as from a command line; `started` explains the arguments."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if forks:
        fork_fork_servers()
    if leads:
        os.setsid()
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    sys.argv = ["fewbits", *argv]  # provenance.json records the command line
    if output is None:
        os.closerange(1, 3)
        sys.stdout = sys.stderr = None  # as in a process that is started without them
    else:
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, resource.RLIM_INFINITY))
    status = cli.main(argv)
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(status)


def started(
    argv: list[str],
    output: Path | None,
    *,
    environment: Mapping[str, str] | None = None,
    file_size: int | None = None,
    leads: bool = False,
    folder: Path | None = None,
    forks: bool = True,
) -> ForkServerProcess:
    """Start `fewbits ARGV` in another process and return it.

    output: the file or terminal for stdout and stderr; None: both are closed. file_size: the limit for written files.
    leads: the process leads a new process group, which the caller must kill. folder: the working directory.
    forks: a fork server that the command starts is forked from it; False: as for users, it imports all modules again.
    """
    arguments = (argv, output, environment or {}, file_size, leads, folder, forks)
    process = server().Process(target=_main, args=arguments, daemon=not leads)  # a daemon cannot have children
    process.start()
    return process


def fork_fork_servers() -> None:
    """Make multiprocessing fork its fork server from this process, which saves the seconds of importing torch."""

    def start(program: bytes, arguments: Sequence[Any], passed: Sequence[int]) -> int:
        code = str(arguments[-1])
        if "multiprocessing.forkserver" not in code:  # this starts the resource tracker
            return execute(program, arguments, passed)
        if child := os.fork():
            return child
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # as fewbits.sweeps.running.preload does
        kept = [0, 1, 2, *sorted(passed)]
        for below, above in itertools.pairwise([*kept, os.sysconf("SC_OPEN_MAX")]):
            os.closerange(below + 1, above)
        try:
            exec(code, {})
        finally:
            os._exit(0)

    execute = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = start  # type: ignore[assignment]  # only the fork server calls it here


@functools.cache
def server() -> multiprocessing.context.ForkServerContext:
    """Return the context of the fork server, which the local backend of sweeps in this process uses, too."""
    context = multiprocessing.get_context("forkserver")
    costly = ["mlflow", "mlflow.store.tracking.sqlalchemy_store"]
    costly += ["torch.distributed.fsdp", "torch._dynamo"]  # for trials of several ranks
    running = ["fewbits.sweeps.running.preload", "fewbits.sweeps.running.run_sweep"]
    context.set_forkserver_preload([*running, *costly, __name__])
    first = context.Process(target=os.getpid, daemon=True)
    first.start()
    first.join()
    return context


def ended(process: ForkServerProcess, timeout: float = 120) -> int:
    """Wait for the process; return its exit status, or minus the number of the signal that ended it."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"the process did not end within {timeout} s")
    return process.exitcode


@contextlib.contextmanager
def ending(process: ForkServerProcess) -> Iterator[ForkServerProcess]:
    """Kill the process at the end of the `with` block if it still runs."""
    try:
        yield process
    finally:
        process.kill()
        process.join()
