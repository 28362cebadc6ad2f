"""Run the trials of a plan on a backend: start each when it is ready, retry it, and record how it ends.

All state that must survive is in the run folders: if the driver is killed, the next driver continues from there. Two
drivers may run trials of the same store, since the lease in a run folder gives one worker at a time the right to train.
If a trial fails and the disk has no room for a checkpoint, the driver stops: the same command resumes all trials.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from fewbits.common.store_folder import free_bytes
from fewbits.experiments.identity import running, total
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.trial import Runtime, Trial
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.cost import checkpoint_bytes, work_of
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.planning.store import Failure, finished, lacks_checkpoint, unfinished
from fewbits.sweeps.planning.sweep import Resources

TURN = 0.5  # seconds between turns of the driver's loop while no trial ends
PATIENCE = 60.0  # seconds for which a stopping driver waits until the running trials have written a checkpoint
TABLES = 1 << 20  # bytes of a trial's tables and logs, about
REST = 5.0  # seconds until a trial that could not run is tried again, for example since another process trains it


# -------------------------------------------------------------------------------- backends


@dataclass(frozen=True)
class Job:
    """The work of one worker: a trial, or one rank of it."""

    id: str  # of the trial
    path: Path  # of the run folder
    trial: Trial
    runtime: Runtime
    made_of: Mapping[str, object]  # the settings and versions whose hash is the id
    sources: str  # digest of the driver's sources that compute (`numerics.total`)
    environment: Mapping[str, str] = field(default_factory=dict)  # variables to set, such as RANK, CUDA_VISIBLE_DEVICES

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path, self.id)

    @property
    def leads(self) -> bool:
        return self.environment.get("RANK", "0") == "0"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Its kind is `over` (the trial has a result), `stopped` (someone asked it to stop), `busy` (another process trains
    the trial) or `failed` (an error; another attempt may succeed unless `wrong_input` is true).
    """

    kind: str
    reason: str = ""  # the error, or the process that trains the trial
    wrong_input: bool = False  # the input is invalid, so another attempt would fail in the same way
    speed: float | None = None  # tokens per second, the median over the steps


@dataclass(frozen=True)
class Ended:
    """The report that a trial's processes have ended."""

    id: str  # of the trial
    outcome: Outcome | None  # None: a process died without reporting an outcome
    why: str = ""  # if a process died: how, in a few words; empty if unknown


class Backend(Protocol):
    """The interface of a backend, which runs the worker processes of trials on this machine or on a cluster."""

    def require(self, trials: Sequence[Planned]) -> None:
        """Raise ValueError if a trial requests more than this machine has and no other machine can run it."""

    def room(self, resources: Resources) -> bool:
        """Tell whether one more trial with these resources may start now."""

    def start(self, job: Job, resources: Resources) -> None:
        """Start a job's trial as soon as its resources are free, and return without waiting for it."""

    def wait(self, seconds: float) -> list[Ended]:
        """Wait until a trial ends, at most `seconds`; return the trials that have ended since the last call."""

    def kill(self, trial: str) -> None:
        """Kill the trial's processes at once. `wait` then reports that the trial died."""

    def close(self) -> None:
        """End all processes that this backend has started, and no others."""


# -------------------------------------------------------------------------------- the driver


class Stage(StrEnum):
    WAITING = "waiting"  # for its parent, for free resources, or until another driver's worker has ended
    STARTED = "started"
    OVER = "over"
    STOPPED = "stopped"  # by `fewbits stop`; the next sweep resumes it
    FAILED = "failed"
    BLOCKED = "blocked"  # its parent ended without writing the checkpoint from which the trial starts


@dataclass
class Task:
    """One trial of the plan, with its stage, attempts and last failure in this driver."""

    planned: Planned
    stage: Stage = Stage.WAITING
    failure: Failure | None = None  # the last failure
    attempts: int = 0  # failed attempts in a row; an attempt that wrote a newer checkpoint sets the count back to 1
    reached: int = 0  # the step of the newest checkpoint when the trial was last started
    rests_until: float = 0.0  # the time before which the driver does not start the trial, by time.monotonic()
    speed: float | None = None  # tokens per second, known when the trial is over

    @property
    def ended(self) -> bool:
        return self.stage in (Stage.OVER, Stage.STOPPED, Stage.FAILED, Stage.BLOCKED)


@dataclass
class Driver:
    """The loop that runs the trials of a plan on a backend."""

    plan: Plan
    backend: Backend
    on_turn: Callable[[Driver], None] = lambda driver: None  # called in every turn of the loop, to show the progress
    stopping: bool = False  # no further trial is started
    disk_full: bool = False  # the driver stops because the disk has no room for a checkpoint
    tasks: dict[str, Task] = field(default_factory=dict)  # by trial id

    def __post_init__(self) -> None:
        self.tasks = {key: Task(planned) for key, planned in self.plan.trials.items()}
        missing = unfinished(self.plan)
        for key, task in self.tasks.items():
            if key not in missing:
                task.stage = Stage.OVER
        self._urgency = _urgency(self.plan)

    def run(self) -> None:
        """Run the trials until all have ended. After `stop`, return when the running trials have stopped."""
        while not all(task.ended for task in self.tasks.values()):
            if not self.stopping:
                self._start_ready()
            for ended in self.backend.wait(TURN):
                self._handle_end(ended)
            self.on_turn(self)
            if self.stopping and self._stop_tasks():
                return
        self.on_turn(self)

    def stop(self) -> None:
        """Make `run` stop all running trials at a checkpoint, and return at the latest PATIENCE seconds after this."""
        self.stopping = True
        self._stop_by = time.monotonic() + PATIENCE

    def of(self, *stages: Stage) -> list[Task]:
        """Return the tasks that are in one of these stages, in the order of the plan."""
        return [task for task in self.tasks.values() if task.stage in stages]

    # -------------------------------------------------------------------------------------------- turns

    def _start_ready(self) -> None:
        """Start ready trials as long as the backend has free resources, those with the largest `_urgency` first."""
        now = time.monotonic()
        for task in sorted(self.of(Stage.WAITING), key=lambda task: self._urgency[task.planned.id], reverse=True):
            planned = task.planned
            if now < task.rests_until or not self._ready(task):
                continue
            if not self.backend.room(planned.resources):
                return
            if store.holder(planned.folder):  # a worker of another driver has the trial
                continue
            if finished(planned):
                task.stage = Stage.OVER
                continue
            task.stage, task.reached = Stage.STARTED, store.reached(planned.folder)
            self.backend.start(job(planned), planned.resources)

    def _ready(self, task: Task) -> bool:
        if task.planned.parent is None:
            return True
        parent = self.tasks[task.planned.parent]
        if parent.stage is Stage.OVER:
            if not lacks_checkpoint(parent.planned, task.planned.trial.branch.step):
                return True
            if not finished(parent.planned):
                self._run_again(parent)
        if parent.ended:
            task.stage, task.failure = Stage.BLOCKED, None
        return False

    def _run_again(self, task: Task) -> None:
        """Queue a finished trial to run again, because a checkpoint from which one of its branches starts is missing.

        After `resources.attempts` attempts, the trial counts as failed.
        """
        task.attempts += 1
        if task.attempts < task.planned.resources.attempts:
            task.stage, task.rests_until = Stage.WAITING, time.monotonic() + REST
        else:
            steps = ", ".join(map(str, sorted(task.planned.keep)))
            reason = f"it has a result, but checkpoints of steps {steps}, from which branches start, are missing"
            task.stage, task.failure = Stage.FAILED, Failure(reason, False, 0, store.last_lines(task.planned.folder))

    def _handle_end(self, ended: Ended) -> None:
        task, outcome = self.tasks[ended.id], ended.outcome
        if task.stage is not Stage.STARTED:  # the driver has cancelled this attempt
            return
        folder = task.planned.folder
        # A worker removes the stop file when it ends, but this driver may have written it just after that.
        if self.stopping:
            with contextlib.suppress(OSError):
                (folder.path / store.STOP).unlink(missing_ok=True)
        kind, wrong_input = (outcome.kind, outcome.wrong_input) if outcome else ("", False)
        if outcome is not None and kind == "over":
            task.stage, task.failure, task.speed = Stage.OVER, None, outcome.speed
            return
        if kind in ("busy", "stopped"):
            task.stage = Stage.STOPPED if kind == "stopped" and not self.stopping else Stage.WAITING
            task.rests_until = time.monotonic() + REST if kind == "busy" else 0.0
            return
        # Without room for one checkpoint, or for the tables, the disk is full.
        if not wrong_input and free_bytes(self.plan.store) < max(TABLES, checkpoint_bytes(task.planned.trial)):
            self.disk_full = True
            with contextlib.suppress(OSError):  # the trial itself has not failed
                (folder.path / store.FAILURE).unlink(missing_ok=True)
            if not self.stopping:
                self.stop()
        # While the driver stops, a worker without an outcome has not failed: a shutdown, for example, ends both.
        if self.disk_full or (outcome is None and self.stopping):
            task.stage = Stage.WAITING
            return
        reached = store.reached(folder)
        reason = ended.why if outcome is None else outcome.reason
        failure = Failure(reason, wrong_input, reached, store.last_lines(folder))
        if store.failure(folder) != failure:  # the worker died or could not write failure.json, so write it here
            with contextlib.suppress(OSError):
                store.write_failure(folder, failure)
        task.attempts = 1 if reached > task.reached else task.attempts + 1
        again = not wrong_input and task.attempts < task.planned.resources.attempts
        task.stage, task.failure = (Stage.WAITING if again else Stage.FAILED), failure

    def _stop_tasks(self) -> bool:
        """Ask running trials to end at a checkpoint, and cancel those that no worker trains yet; True: none runs more.

        PATIENCE seconds after the call of `stop`, the result is True, too.
        """
        for task in self.of(Stage.STARTED):
            if store.holder(task.planned.folder):
                with contextlib.suppress(OSError):  # raised on a full disk; the next turn tries again
                    (task.planned.folder.path / store.STOP).touch()
            else:
                self.backend.kill(task.planned.id)
                task.stage = Stage.WAITING
        return not self.of(Stage.STARTED) or time.monotonic() > self._stop_by


def _urgency(plan: Plan) -> dict[str, float]:
    """Return, by trial id, the trial's FLOPs plus those of the costliest chain of branches that starts from it."""
    below = dict.fromkeys(plan.trials, 0.0)
    urgency = {}
    for key, planned in reversed(plan.trials.items()):  # branches first, since a plan lists parents before them
        urgency[key] = work_of(planned.trial) + below[key]
        if planned.parent is not None:
            below[planned.parent] = max(below[planned.parent], urgency[key])
    return urgency


def job(planned: Planned) -> Job:
    """Return the job that trains a planned trial and keeps the checkpoints from which branches start.

    The job sends nothing to MLflow, since the driver's process sends the data of all trials there.
    """
    keep = tuple(sorted({*planned.runtime.keep_steps, *planned.keep}))
    runtime = replace(planned.runtime, keep_steps=keep, runs=str(planned.folder.path.parent), tracking="none")
    return Job(planned.id, planned.folder.path, planned.trial, runtime, planned.made_of, total(running()))
