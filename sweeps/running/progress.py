"""Compute what the progress display of a sweep shows: counts, speed and time left, and a bar for each running trial."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from fewbits.common.terminal import Bar, Progress
from fewbits.common.wording import clock, plural
from fewbits.sweeps.planning.cost import Speeds, tokens_of, work_of
from fewbits.sweeps.planning.plan import Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.driver import Driver, Stage, Task
from fewbits.sweeps.running.store import Failure, State
from fewbits.sweeps.running.trial_status import HALF_DONE

WARM = 10.0  # seconds after which the time left is estimated from the speed of this sweep


class Display(Progress):
    """The progress display of a sweep; the driver calls the object in every turn of its loop."""

    def __init__(self, speeds: Speeds, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.began: float | None = None  # when the first trial began, by time.monotonic()
        self._speeds = speeds
        self._done_before = 0.0  # the FLOPs of the plan that were done when the first trial began
        self._reached: dict[str, float] = {}  # by trial id: the fraction of its steps that was done before this sweep
        self._failures: dict[str, Failure] = {}  # by trial id: its last failure that was printed
        self._stopped: set[str] = set()  # ids of trials whose stop by a user was printed
        self._stopping = False  # it was printed that the sweep stops

    def __call__(self, driver: Driver) -> None:
        self._print_events(driver)
        if all(task.ended for task in driver.tasks.values()):
            return  # `run_sweep` prints the summary next
        here, elsewhere = (
            [task for task in driver.of(stage) if store.holder(task.planned.folder)]
            for stage in (Stage.STARTED, Stage.WAITING)
        )
        begun = {task.planned.id: task for task in [*driver.of(Stage.STARTED), *elsewhere]}
        reports = {key: store.progress(task.planned.folder) or {} for key, task in begun.items()}
        running, counts = [*here, *elsewhere], _counts(driver, here, elsewhere)
        texts = [f"{plural(len(driver.tasks), 'trial')}: " + ", ".join(f"{count} {name}" for name, count in counts)]
        if speed := sum(reports[task.planned.id].get("tokens_per_second", 0.0) for task in running):
            texts.append(f"{speed:,.0f} tokens/s")
        if (left := self._seconds_left(driver, reports, len(running))) is not None:
            texts.append(f"{clock(left)} left")
        texts += ["stopping at checkpoints"] if driver.stopping else []
        self.update("  ".join(texts), [bar(task.planned, reports[task.planned.id]) for task in running], counts)

    def _print_events(self, driver: Driver) -> None:
        """Print a line for each new failure, for each trial that a user stopped, and when the sweep begins to stop."""
        for task in driver.of(Stage.WAITING, Stage.STARTED, Stage.FAILED, Stage.STOPPED):
            name = task.planned.folder.path.name
            if task.failure is not None and self._failures.get(task.planned.id) is not task.failure:
                self._failures[task.planned.id] = task.failure
                again = "not tried again" if task.stage is Stage.FAILED else "trying again"
                self.print_line(f"{name}: {task.failure.reason}; {again}")
            elif task.stage is Stage.STOPPED and task.planned.id not in self._stopped:
                self._stopped.add(task.planned.id)
                self.print_line(f"{name}: stopped at step {store.reached(task.planned.folder)} by `fewbits stop`")
        if driver.stopping and not self._stopping:
            self._stopping = True
            reason = "the disk is full: " if driver.disk_full else "stopping: "
            self.print_line(f"fewbits: {reason}trials end at a checkpoint (Ctrl-C again: stop at once)")

    def _seconds_left(self, driver: Driver, reports: Mapping[str, Mapping[str, Any]], slots: int) -> float | None:
        """Estimate the seconds until all trials have ended, at first from speeds in the store, then from this sweep's.

        Return None if no trial has begun, none runs, or a speed is unknown. reports: by trial id, the progress that its
        worker wrote. slots: the number of trials that run now.
        """
        tasks = driver.tasks
        if not self._reached:
            self._reached = {
                key: store.reached(task.planned.folder) / task.planned.trial.training.steps
                for key, task in tasks.items()
                if not task.ended
            }
        parts = self._reached | {key: report["step"] / report["steps"] for key, report in reports.items() if report}
        shares = {key: 0.0 if task.ended else 1 - parts.get(key, 0.0) for key, task in tasks.items()}
        amounts = {key: work_of(task.planned.trial) for key, task in tasks.items()}
        left = sum(share * amounts[key] for key, share in shares.items())
        done, now = sum(amounts.values()) - left, time.monotonic()
        if self.began is None and slots:
            self.began, self._done_before = now, done
        if self.began is None or not slots:
            return None
        if now - self.began > WARM and done > self._done_before:
            return left * (now - self.began) / (done - self._done_before)
        seconds = {key: self._speeds.seconds(tasks[key].planned) for key, share in shares.items() if share}
        known = [shares[key] * whole for key, whole in seconds.items() if whole is not None]
        return sum(known) / slots if len(known) == len(seconds) else None


def _counts(driver: Driver, here: Sequence[Task], elsewhere: Sequence[Task]) -> tuple[tuple[str, int], ...]:
    """Return pairs (state, number of its trials); `done` is always included, other states only if a trial is in them.

    here, elsewhere: the trials that run for this driver and for other drivers.
    """
    over = driver.of(Stage.OVER)
    diverged = sum(store.state(task.planned.folder) is State.DIVERGED for task in over)
    counts = {
        "done": len(over) - diverged,
        "running": len(here),
        "running elsewhere": len(elsewhere),
        "stopped": len(driver.of(Stage.STOPPED)),
        "failed": len(driver.of(Stage.FAILED)),
        "diverged": diverged,
        "blocked": len(driver.of(Stage.BLOCKED)),
    }
    running = {task.planned.id for task in [*here, *elsewhere]}
    others = [task for task in driver.of(Stage.WAITING, Stage.STARTED) if task.planned.id not in running]
    counts[HALF_DONE] = sum(store.reached(task.planned.folder) > 0 for task in others)
    counts[State.PLANNED] = len(others) - counts[HALF_DONE]
    return tuple((name, count) for name, count in counts.items() if count or name == "done")


def bar(planned: Planned, report: Mapping[str, Any]) -> Bar:
    """Return the bar of a running trial. report: the last progress that its worker wrote (see `store.progress`)."""
    trial, step, speed = planned.trial, int(report.get("step", 0)), report.get("tokens_per_second")
    left = tokens_of(trial) * (1 - step / trial.training.steps) / speed if speed else None
    return Bar(planned.folder.path.name, step, trial.training.steps, report.get("loss"), speed, left)
