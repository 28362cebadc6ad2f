"""Have a plan done: what is ready is given to the backend, what died goes on from its checkpoint, what is over counts.

The driver holds nothing that files do not: killed at any time, its successor reads from the store what there is. Two
drivers on one store share its trials through their leases.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from fewbits.sweeps.planning.cost import work_of
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.backend import Backend, Ended
from fewbits.sweeps.running.placement import Placement
from fewbits.sweeps.running.store import OVER, Failure
from fewbits.sweeps.running.trial_status import lacks

if TYPE_CHECKING:
    from fewbits.sweeps.running.worker import Job

TURN = 0.5  # seconds between looks around, while nothing ends
PATIENCE = 60.0  # seconds that trials have to reach a checkpoint, once a stop is asked for
REST = 5.0  # seconds before a trial is tried again that another process was found at


class Stage(StrEnum):
    WAITING = "waiting"  # for its parent, for room, or for another driver's worker
    STARTED = "started"
    OVER = "over"
    FAILED = "failed"
    BLOCKED = "blocked"  # its parent failed, or diverged too early


@dataclass
class Task:
    """A trial of the plan, as the driver knows it."""

    planned: Planned
    stage: Stage = Stage.WAITING
    failure: Failure | None = None
    attempts: int = 0  # since the last step forward
    reached: int = 0
    began: float = 0.0
    rests_until: float = 0.0
    late: bool = False  # ended by its time limit
    speed: float | None = None
    like: str | None = None  # the kind of machine that it was started for

    @property
    def ended(self) -> bool:
        return self.stage in (Stage.OVER, Stage.FAILED, Stage.BLOCKED)


@dataclass
class Driver:
    plan: Plan
    backend: Backend
    look: Callable[[Driver], None] = lambda driver: None  # called every turn: the live line, MLflow
    placement: Placement | None = None  # None: trials run on any kind of machine
    stopping: bool = False
    tasks: dict[str, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tasks = {key: Task(planned) for key, planned in self.plan.trials.items()}
        for task in self.tasks.values():
            if finished(task.planned):
                task.stage = Stage.OVER
        self._urgency = _urgency(self.plan)

    def run(self) -> None:
        """Until everything has ended, or, after `stop`, what runs has stopped."""
        while not all(task.ended for task in self.tasks.values()):
            if not self.stopping:
                self._give_out()
            for ended in self.backend.wait(TURN):
                self._take_in(ended)
            self._end_late_ones()
            self.look(self)
            if self.stopping and self._stopped():
                return
        self.look(self)

    def stop(self) -> None:
        """Have every running trial end at a checkpoint, and `run` then."""
        self.stopping = True
        self._stop_by = time.monotonic() + PATIENCE

    def of(self, *stages: Stage) -> list[Task]:
        return [task for task in self.tasks.values() if task.stage in stages]

    # -------------------------------------------------------------------------------------------- turns

    def _give_out(self) -> None:
        """The longest first, and before them what others wait for."""
        now = time.monotonic()
        full: set[str | None] = set()  # kinds of machines without room
        self._take_back_lost_ones()
        ready = [task for task in self.of(Stage.WAITING) if now >= task.rests_until and self._ready(task)]
        for task in sorted(ready, key=lambda task: self._urgency[task.planned.id], reverse=True):
            planned = task.planned
            like = self.placement.kind_for(planned) if self.placement else None
            if like in full or (self.placement and self.placement.waits(like, planned.resources)):
                continue
            if not self.backend.room(planned.resources, like):
                full.add(like)
                continue
            if store.holder(planned.folder):  # of another driver, for as long as it lives
                continue
            if finished(planned):
                task.stage = Stage.OVER
                continue
            task.stage, task.began, task.late, task.like = Stage.STARTED, time.monotonic(), False, like
            task.reached = store.reached(planned.folder)
            self.backend.start(job(planned), planned.resources, like)

    def _take_back_lost_ones(self) -> None:
        """Take back trials that are queued for a kind of machine which is not there any more."""
        if self.placement is None:
            return
        self.placement.look()
        for task in self.of(Stage.STARTED):
            lost = self.placement.is_lost(task.like, task.planned.resources)
            if lost and not store.holder(task.planned.folder):
                self.backend.kill(task.planned.id)
                task.stage, task.rests_until = Stage.WAITING, time.monotonic() + REST

    def _ready(self, task: Task) -> bool:
        if task.planned.parent is None:
            return True
        parent = self.tasks[task.planned.parent]
        if parent.stage is Stage.OVER:
            if not lacks(parent.planned, task.planned.trial.branch.step):
                return True
            if not finished(parent.planned):
                self._once_more(parent)
        if parent.ended:
            task.stage, task.failure = Stage.BLOCKED, None
        return False

    def _once_more(self, task: Task) -> None:
        """It was over, but lacks what others start from: removed since, or not to be seen from here yet."""
        task.attempts += 1
        if task.attempts < task.planned.resources.attempts:
            task.stage, task.rests_until = Stage.WAITING, time.monotonic() + REST
        else:
            steps = ", ".join(map(str, sorted(task.planned.keep)))
            reason = f"it is over, and of the checkpoints of steps {steps}, which others start from, some are not there"
            task.stage, task.failure = Stage.FAILED, Failure(reason, False, 0, store.last_lines(task.planned.folder))

    def _take_in(self, ended: Ended) -> None:
        task, outcome = self.tasks[ended.id], ended.outcome
        if task.stage is not Stage.STARTED:  # taken back
            return
        folder = task.planned.folder
        if self.stopping:  # it may have been asked once more after it had heard
            with contextlib.suppress(OSError):
                (folder.path / store.STOP).unlink(missing_ok=True)
        if outcome is not None and outcome.kind == "over":
            task.stage, task.failure, task.speed = Stage.OVER, None, outcome.speed
            return
        if outcome is not None and outcome.kind in ("busy", "stopped"):
            task.stage = Stage.WAITING
            task.rests_until = time.monotonic() + REST if outcome.kind == "busy" else 0.0
            return
        reached = store.reached(folder)
        reason = ended.why if outcome is None else outcome.reason
        if task.late:
            reason = f"ended after {task.planned.resources.hours:g} hours, its limit"
        wrong_input = outcome is not None and outcome.wrong_input
        failure = Failure(reason, wrong_input, reached, store.last_lines(folder))
        if store.failure(folder) != failure:  # which the worker could not say
            with contextlib.suppress(OSError):
                store.write_failure(folder, failure)
        task.attempts = 1 if reached > task.reached else task.attempts + 1
        again = not failure.wrong_input and not task.late and task.attempts < task.planned.resources.attempts
        task.stage, task.failure = (Stage.WAITING if again else Stage.FAILED), failure

    def _end_late_ones(self) -> None:
        for task in self.of(Stage.STARTED):
            hours = task.planned.resources.hours
            if not hours or task.late:
                continue
            if not store.holder(task.planned.folder):
                task.began = time.monotonic()  # still queued
            elif time.monotonic() - task.began > 3600 * hours:
                task.late = True
                self.backend.kill(task.planned.id)

    def _stopped(self) -> bool:
        """Ask what runs to end; what has not begun is taken back."""
        for task in self.of(Stage.STARTED):
            if store.holder(task.planned.folder):
                with contextlib.suppress(OSError):  # a disk that is full has room for it in a moment, or never
                    (task.planned.folder.path / store.STOP).touch()
            else:
                self.backend.kill(task.planned.id)
                task.stage = Stage.WAITING
        return not self.of(Stage.STARTED) or time.monotonic() > self._stop_by


def _urgency(plan: Plan) -> dict[str, float]:
    """What a trial takes, and the longest line of branches below it."""
    below = dict.fromkeys(plan.trials, 0.0)
    found = {}
    for key, planned in reversed(plan.trials.items()):  # parents come before their branches
        found[key] = work_of(planned.trial) + below[key]
        if planned.parent is not None:
            below[planned.parent] = max(below[planned.parent], found[key])
    return found


def job(planned: Planned) -> Job:
    from fewbits.sweeps.running.worker import Job

    keep = tuple(sorted({*planned.runtime.keep_steps, *planned.keep}))
    runtime = replace(planned.runtime, keep_steps=keep, runs=str(planned.folder.path.parent), tracking="none")
    return Job(planned.id, planned.folder.path, planned.trial, runtime, planned.made_of)


def finished(planned: Planned) -> bool:
    """Tell whether there is a result, with the evaluation that is asked for, and what other trials start from."""
    if store.state(planned.folder) not in OVER or not planned.folder.has(planned.keep):
        return False
    return not planned.trial.evaluation.missing_from(planned.folder.result() or {})
