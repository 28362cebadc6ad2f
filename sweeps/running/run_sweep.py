"""Run the trials of a plan and print a summary: start the backend, driver and display, update MLflow, handle Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from fewbits.common.arguments import warn_in_lines
from fewbits.common.process import handled
from fewbits.common.store_folder import free_bytes, size
from fewbits.common.terminal import notice
from fewbits.common.wording import plural
from fewbits.sweeps.cluster.access import worker_variables
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.cost import Speeds, disk, remaining, slots_of
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.store import State, counted, trial_statuses, unfinished
from fewbits.sweeps.planning.stored_plans import save_plan
from fewbits.sweeps.running.driver import Backend, Driver, Stage, Task
from fewbits.sweeps.running.progress import Display
from fewbits.sweeps.tracking.mirror import Mirror

SHOWN = 8  # lines of a failed trial's log that the summary prints
SYNC = 5.0  # seconds between updates of MLflow
SYNC_WAIT = 60.0  # seconds to wait for an update of MLflow that still runs when all trials have ended
AGAIN = "run the same command again"
STOPPED = 130  # the exit status if Ctrl-C or SIGTERM stopped the sweep


@dataclass(frozen=True)
class Where:
    """The options that choose the backend for trials."""

    backend: str = "ray"  # or `local`
    address: str | None = None  # of a Ray cluster; None: start Ray on this machine
    parallel: int | None = None  # the largest number of trials at a time; None: as many as fit
    variables: Sequence[str] = ()  # names of further environment variables for a cluster's workers (access.py)

    def open(self) -> Backend:
        """Start the backend and return it; the caller has to close it."""
        if self.backend == "local":
            from fewbits.sweeps.running.local import Local

            return Local(self.parallel)
        from fewbits.sweeps.running.on_ray import OnRay

        return OnRay(self.address, self.parallel, worker_variables(os.environ, self.variables))


def run_sweep(plan: Plan, where: Where, mirror: Mirror) -> int:
    """Run those trials of the plan that are not finished, print a summary, and return the exit status."""
    driver = run_trials(plan, where, mirror)
    return conclude(plan, [driver] if driver else [], mirror)


def store_plan(plan: Plan, overrides: Sequence[str]) -> None:
    """Store the plan, so that `load_plan` finds it by these overrides; raise ValueError if it cannot be written."""
    try:
        save_plan(plan, overrides)
    except OSError as error:
        raise ValueError(f"{error.filename or 'the store'} cannot be written: {error.strerror}") from error


def run_trials(plan: Plan, where: Where, mirror: Mirror, opened: Callable[[], Backend] | None = None) -> Driver | None:
    """Run the trials of a plan that have to run, and return the driver when they have ended; None if none has to run.

    Warnings that are raised meanwhile are printed as lines of the progress display. opened: returns a backend that is
    open already, and that is not closed; None: start a backend, and close it at the end.
    """
    stuck = {key for key, status in trial_statuses(plan).items() if status.blocked_permanently}
    has_to_run = unfinished(plan) - stuck
    missing = [planned for key, planned in plan.trials.items() if key in has_to_run]
    if not missing:
        return None
    display = Display()
    with warnings.catch_warnings():
        warnings.showwarning = display.warn  # type: ignore[assignment]  # its type names only the first argument
        start = "; starting Ray" if where.backend == "ray" and not where.address and opened is None else ""
        need, free = disk(missing), free_bytes(plan.store)
        space = f"{size(need)} of checkpoints, {size(free)} free on the disk" + (": too little" * (need > free))
        display.print_line(f"{len(missing)} of {plural(len(plan.trials), 'trial')} to run: {space}{start}")
        if not where.address:
            display.print_line(remaining(missing, where.parallel or slots_of(missing), Speeds(plan.store)))
        with contextlib.closing(display), contextlib.ExitStack() as closing:
            chosen = opened() if opened else closing.enter_context(contextlib.closing(where.open()))
            chosen.require(missing)
            driver = Driver(plan, chosen, display)
            with _interruptible(driver), _updated(mirror):
                driver.run()
    speeds = Speeds(plan.store)
    with contextlib.suppress(OSError):  # on a full disk, the speeds are not stored, and later estimates lack them
        for task in driver.tasks.values():
            if task.speed is not None:
                speeds.store_speed(task.planned, task.speed)
    return driver


def conclude(plan: Plan, drivers: Sequence[Driver], mirror: Mirror) -> int:
    """Print the summary of a plan and the links to MLflow, and return the exit status.

    drivers: all drivers of this command that have run trials of the plan.
    """
    status = _summary(plan, drivers)
    with warnings.catch_warnings():
        warn_in_lines()
        # If no trial ran, `fewbits ui` sends what the store's own database lacks.
        shown = mirror.sync(last=True) if drivers or mirror.to_server else True
    if status != STOPPED and shown:
        print(mirror.line)
    return status


@contextmanager
def _updated(mirror: Mirror) -> Iterator[None]:
    """Update MLflow every SYNC seconds while the `with` block runs, in a thread, since MLflow may not answer at once.

    After a slow update, the pause is longer, so that large sweeps leave the processors to their trials. If the block
    ends without an error, wait up to SYNC_WAIT seconds for an update that still runs.
    """
    ended = threading.Event()

    def update() -> None:
        pause = 0.0
        while not ended.wait(pause):
            began = time.monotonic()
            mirror.sync()
            pause = max(SYNC, 10 * (time.monotonic() - began))

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    try:
        yield
        ended.set()
        thread.join(SYNC_WAIT)
    finally:
        ended.set()


@contextmanager
def _interruptible(driver: Driver) -> Iterator[None]:
    """Call `driver.stop` on the first Ctrl-C or SIGTERM in the `with` block, and raise KeyboardInterrupt on the second.

    The block has to begin after the backend has started, because Ray then installs its own handler for SIGTERM.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if driver.stopping:
            raise KeyboardInterrupt
        driver.stop()

    with handled(interrupt, signal.SIGINT, signal.SIGTERM):
        yield


def _summary(plan: Plan, drivers: Sequence[Driver]) -> int:
    """Print the number of trials in each state, each failed or blocked trial and what to do; return the exit status.

    The status is 0 if all trials have a result, 130 if the user stopped the sweep, else 1.
    """
    failed, stopped, waiting = (
        [task for driver in drivers for task in driver.of(stage)]
        for stage in (Stage.FAILED, Stage.STOPPED, Stage.BLOCKED)
    )
    statuses = trial_statuses(plan, [task.planned.id for task in failed])
    print(f"{plural(len(statuses), 'trial')}: {counted(plan, statuses)}")
    for key, status in statuses.items():
        folder = plan.trials[key].folder
        if status.state is State.DIVERGED:
            print(f"diverged: {folder.path} at step {(folder.result() or {}).get('step')}")
        elif status.state is State.BLOCKED:
            print(f"blocked: {folder.path}: {status.why}", file=sys.stderr)
    for task in failed:
        print(_failure_lines(task), file=sys.stderr)
    if any(driver.disk_full for driver in drivers):
        notice(
            f"stopped: the disk of {plan.store} is full ({size(free_bytes(plan.store))} free): make room (`fewbits "
            f"prune` lists what can be removed), then {AGAIN} to resume"
        )
        return 1
    if any(driver.stopping for driver in drivers):
        notice(f"stopped; {AGAIN} to resume")
        return STOPPED
    blocked = [status for status in statuses.values() if status.state is State.BLOCKED]
    stuck = sum(status.blocked_permanently for status in blocked)
    wrong = sum(task.failure is not None and task.failure.wrong_input for task in failed)
    named = {task.planned.id for task in [*failed, *stopped, *(waiting if stopped else [])]}
    gone = sum(status.state not in store.ENDED and key not in named for key, status in statuses.items())
    problems = (
        (wrong, "failed on invalid input: fix the config"),
        (len(failed) - wrong, f"failed: {AGAIN} to resume them from their checkpoints"),
        (len(blocked) - stuck, "blocked by failed trials"),
        (stuck, "blocked permanently: their parent diverged before the step at which they start"),
        (len(stopped), f"stopped by `fewbits stop`: {AGAIN} to resume them"),
        (gone, f"finished, but their results are now missing from the store: {AGAIN}"),
    )
    if any(count for count, _ in problems):
        notice("; ".join(f"{count} {problem}" for count, problem in problems if count))
        return 1
    return 0


def _failure_lines(task: Task) -> str:
    failure = task.failure
    assert failure is not None
    lines = [f"failed: {task.planned.folder.path}: {failure.reason}"]
    lines += [f"    {line}" for line in failure.log[-SHOWN:]]
    lines.append(f"    (the whole log: {task.planned.folder.path / store.LOG})")
    return "\n".join(lines)
