"""Provide tiny sweeps for tests: sweep files, plans, commands in their own processes, and functions to read results."""

import atexit
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import yaml

from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.studies import load_sweeps
from tests.experiments import trial_inputs
from tests.experiments.trial_inputs import TINY, left
from tests.ray_head import parent_of

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0  # seconds after which a wait fails; the waits take a few seconds, but over 180 on a busy machine
SETTINGS = TINY | {
    "training.steps": 8,
    "training.checkpoint_every": 2,
    "training.length": 64,
    "training.micro_batch": 4,
    "evaluation.every": 8,
    "observer.gradients_every": 8,
}
FAMILY: dict[str, Any] = {
    "seeds": [0, 1],
    "arms": {
        "plain": {"overrides": ["recipe=bf16"], "axes": []},
        "noisy": {"overrides": ["recipe=nvfp4"]},
        "late": {"overrides": ["recipe=nvfp4"], "axes": [], "parent": "plain", "at": 0.5},
    },
    "axes": {"optimizer.lr": [0.001, 0.002]},
    "resources": {"attempts": 9},
}
SOME = ("seeds=[0]",)  # an override that selects four of the eight trials of FAMILY


def tiny(cache: Path, *more: str) -> list[str]:
    """Return the overrides of a tiny trial: the defaults, except those whose keys are in `more`, and then `more`."""
    settings = SETTINGS | {"runtime.device": "cpu", "runtime.cache": str(cache)}
    replaced = {override.partition("=")[0] for override in more}
    return [*(f"{key}={value}" for key, value in settings.items() if key not in replaced), *more]


def sweep_file(folder: Path, data: Mapping[str, Any], name: str = "tiny") -> Path:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(data), sort_keys=False))
    return path


def tiny_file(folder: Path, cache: Path, data: Mapping[str, Any], name: str = "tiny") -> Path:
    """Write the sweep file FOLDER/NAME.yaml with the content `data` for tiny trials, and return its path.

    `data["overrides"]` replace the default overrides of the same keys.
    """
    overrides = tiny(cache, *data.get("overrides", ()))
    return sweep_file(folder, {"size": [], **data, "overrides": overrides}, name)


def planned(*overrides: str | Path) -> Plan:
    return plan(*load_sweeps([str(word) for word in overrides]))


def folders(plan: Plan) -> list[RunFolder]:
    return [planned.folder for planned in plan.trials.values()]


def all_left(plan: Plan) -> dict[str, dict[str, bytes]]:
    """Return name of the run folder → file name → content, for the files whose bits have to be reproducible."""
    return {folder.path.name: left(folder.path) for folder in folders(plan)}


def until(there: Callable[[], T], interval: float = 0.01) -> T:
    """Call `there` every `interval` seconds until its result is true, and return it; fail after PATIENCE seconds."""
    give_up = time.monotonic() + PATIENCE
    while not (result := there()):
        assert time.monotonic() < give_up, "the expected state has not been reached"
        time.sleep(interval)
    return result


# ------------------------------------------------------------------------------------------------ commands


@dataclass
class Command:
    """A `fewbits` command that runs in its own process and process group."""

    process: ForkServerProcess
    output: Path | None  # the file with its stdout and stderr; None: both are closed

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def printed(self) -> str:
        return self.output.read_text() if self.output else ""

    def end(self, patience: float = PATIENCE) -> int:
        self.process.join(patience)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"the command has not ended within {patience} s:\n{self.printed}")
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def until(self, there: Callable[[], T], interval: float = 0.01) -> T:
        """Call `there` every `interval` seconds until its result is true, and return this result.

        Fail if the command ends before that, or if PATIENCE seconds have passed.
        """

        def checked() -> T:
            result = there()
            assert result or self.process.exitcode is None, self.printed
            return result

        return until(checked, interval)


def started(
    output: Path | None, *arguments: str | Path, environment: Mapping[str, str] | None = None, forks: bool = True
) -> Command:
    surroundings = {"PYTHONPATH": str(ROOT / "src"), **(environment or {})}
    process = trial_inputs.started([*map(str, arguments)], output, environment=surroundings, leads=True, forks=forks)
    # If a test fails, its command still runs; without this, multiprocessing would wait for it when pytest ends.
    atexit.register(process.kill)
    return Command(process, output)


# ------------------------------------------------------------------------------------------------ what runs


def holder_of(folder: RunFolder) -> int | None:
    """Return the id of the process that holds the trial's lease, or None."""
    holder = store.holder(folder)
    return None if holder is None else holder.pid


def running(plan: Plan) -> list[RunFolder]:
    return [folder for folder in folders(plan) if holder_of(folder) is not None]


def send(process: int, number: signal.Signals) -> bool:
    """Send a signal to a process; return False if the process does not exist any more."""
    with suppress(ProcessLookupError):
        os.kill(process, number)
        return True
    return False


def kill_workers(command: Command, plan: Plan, count: int, interval: float = 0.01) -> None:
    """Kill workers at random times after their first steps; after each, wait until its trial is trained again."""
    killed = set[int]()  # by process id, since a zombie may be killed twice but counts once
    while len(killed) < count:
        command.until(lambda: any(map(steps_done, running(plan))), interval)
        time.sleep(random.uniform(0, 0.5))
        if at := [folder for folder in running(plan) if steps_done(folder)]:
            hit = random.choice(at)
            pid, before = holder_of(hit), attempts(hit)
            if pid is not None and send(pid, signal.SIGKILL) and hit.result() is None:
                killed.add(pid)
                command.until(lambda: attempts(hit) > before, interval)  # noqa: B023, called at once


@contextmanager
def node_killed(plan: Plan, ready: Callable[[RunFolder], bool]) -> Iterator[list[RunFolder]]:
    """During the `with` block, kill the first node that trains a trial which is `ready`, with the trial's worker.

    Yield a list that has the trial's folder once the node is killed.
    """
    killed, ended = list[RunFolder](), Event()

    def kill() -> None:
        while not ended.wait(0.05):
            for folder in running(plan):
                worker = holder_of(folder)
                if worker is not None and ready(folder):
                    killed.append(folder)
                    os.kill(parent_of(worker), signal.SIGKILL)  # the raylet: Ray's main process of the node
                    send(worker, signal.SIGKILL)  # since a machine that is lost loses its workers at the same moment
                    return

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        try:
            yield killed
        finally:
            ended.set()
        killing.result()


def steps_done(folder: RunFolder) -> int:
    """Return the last step that a running trial has written to progress.json; 0 if there is none."""
    return int((store.progress(folder) or {}).get("step", 0))


def attempts(folder: RunFolder) -> int:
    """Return how many worker processes have trained the trial, by the lines in its log."""
    try:
        return (folder.path / store.LOG).read_text().count("  process ")
    except FileNotFoundError:
        return 0


def reported_steps(folder: RunFolder) -> list[list[int]]:
    """Return for each worker process of a trial the list of steps that it wrote to the log."""
    found: list[list[int]] = []
    for line in (folder.path / store.LOG).read_text().splitlines():
        fields = line.split()[2:]  # without date and time
        if fields[:1] == ["process"]:
            found.append([])
        elif fields[:1] == ["step"]:
            found[-1].append(int(fields[1].partition("/")[0]))
    return found


def trained_twice(folder: RunFolder) -> list[int]:
    """Return the steps that a worker trained again although a checkpoint of this or a later step existed.

    The list has to be empty if trials resume from their newest checkpoints.
    """
    every, before, found = int(str(SETTINGS["training.checkpoint_every"])), 0, []
    for steps in reported_steps(folder):
        # The step of the newest checkpoint that certainly existed: a step is reported before its checkpoint is written.
        saved = max(before - 1, 0) // every * every
        found += [step for step in steps if step <= saved]
        before = max([before, *steps])
    return found
