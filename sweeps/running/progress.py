"""Show how far the trials of a sweep are: the display of a running sweep, `fewbits status`, its `--watch`, and logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from fewbits.common.store_folder import runs_option
from fewbits.common.terminal import Bar, Progress
from fewbits.common.wording import clock, plural
from fewbits.experiments.environment import kinds_of
from fewbits.experiments.identity import is_current
from fewbits.experiments.storage.run_folder import HASH, RunFolder
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.cost import tokens_of, work_of
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.planning.store import ENDED, HALF_DONE, OVER, Failure, State, TrialStatus, counted, trial_statuses
from fewbits.sweeps.running.driver import Driver, Stage

EVERY = 2.0  # seconds between two updates of `--watch`
POLL = 0.3  # seconds between two reads of a log


def bar(planned: Planned, report: Mapping[str, Any]) -> Bar:
    """Return the bar of a running trial. report: the last progress that its worker wrote (see `store.progress`)."""
    trial, step, speed = planned.trial, int(report.get("step", 0)), report.get("tokens_per_second")
    left = tokens_of(trial) * (1 - step / trial.training.steps) / speed if speed else None
    return Bar(planned.folder.path.name, step, trial.training.steps, report.get("loss"), speed, left)


class Display(Progress):
    """The progress display of a sweep; the driver calls the object in every turn of its loop."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._failures: dict[str, Failure] = {}  # by trial id: its last failure that was printed
        self._stopped: set[str] = set()  # ids of trials whose stop by a user was printed
        self._stopping = False  # it was printed that the sweep stops
        self._due = 0.0  # when to look at the trials' files again, which takes long with many trials

    def __call__(self, driver: Driver) -> None:
        self._print_events(driver)
        began = time.monotonic()
        ended = all(task.ended for task in driver.tasks.values())  # then `run_sweep` prints the summary next
        if not ended and began >= self._due:
            statuses = trial_statuses(driver.plan)
            started = {task.planned.id for task in driver.of(Stage.STARTED)}
            # A worker writes that its trial failed before the driver learns of it, and decides what this means.
            if not any(statuses[key].state is State.FAILED for key in started):
                _show(self, driver.plan, statuses, *["stopping at checkpoints"] * driver.stopping)
            took = time.monotonic() - began
            self._due = began + (20 * took if took > 0.02 else 0)

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


def watch(
    plan: Callable[[], Plan], every: float = EVERY, display: Progress | None = None, pause: Any = time.sleep
) -> dict[str, TrialStatus]:
    """Show the progress until all trials have ended, and return their statuses by trial id.

    plan: returns the current plan, which a multirun extends. every: seconds between updates. pause: called to wait.
    """
    display, failures = display or Progress(), dict[str, str]()
    try:
        while True:
            current = plan()
            statuses = trial_statuses(current)
            for key, status in statuses.items():
                if status.state is State.FAILED and failures.get(key) != status.why:
                    failures[key] = status.why
                    display.print_line(f"{current.trials[key].folder.path.name}: failed: {status.why}")
            if all(status.state in ENDED for status in statuses.values()):
                return statuses
            _show(display, current, statuses)
            pause(every)
    finally:
        display.close()


def _show(display: Progress, plan: Plan, statuses: Mapping[str, TrialStatus], *more: str) -> None:
    """Show the number of trials in each state, the speed and time left, further texts, and a bar for each.

    The time left is the FLOPs that the unfinished trials still need, divided by the FLOPs per second of the running
    ones; it is not shown while no speed is known.
    """
    running = [plan.trials[key] for key, status in statuses.items() if status.state is State.RUNNING]
    reports = {planned.id: store.progress(planned.folder) or {} for planned in running}
    speeds = {key: report.get("tokens_per_second", 0.0) for key, report in reports.items()}
    counts = counted(plan, statuses)
    texts = [f"{plural(len(statuses), 'trial')}: {counts}"]
    if speed := sum(speeds.values()):
        left = 0.0
        for key, planned in plan.trials.items():
            if statuses[key].state not in ENDED:
                step = reports.get(key, {}).get("step") or store.reached(planned.folder)
                left += work_of(planned.trial) * (1 - step / planned.trial.training.steps)
        rate = sum(speeds[one.id] * work_of(one.trial) / tokens_of(one.trial) for one in running)
        texts += [f"{speed:,.0f} tokens/s", f"{clock(left / rate)} left"]
    display.update("  ".join([*texts, *more]), [bar(one, reports[one.id]) for one in running], counts)


# -------------------------------------------------------------------------------- fewbits status


@dataclass(frozen=True)
class Row:
    """The state of the trial at one place of a sweep: a row of the printed table, or a JSON object with `--json`."""

    sweep: str
    place: dict[str, str]  # arm, axes and seed, with their values
    folder: str  # the name of the run folder
    state: State
    step: int  # a running trial's current step, a finished trial's last step, else the step of the newest checkpoint
    steps: int  # the trial's number of training steps
    note: str = ""  # why the trial failed or is blocked, or that another version of the code computed it
    kind: str | None = None  # the kind of processor or GPU that computed it, `A, then B` if several; None: unknown

    @property
    def progress(self) -> str:
        if self.state is State.PLANNED:
            return f"{HALF_DONE} {self.step}/{self.steps}" if self.step else "planned"
        return self.state if self.state is State.BLOCKED else f"{self.state} {self.step}/{self.steps}"


def rows_of(plan: Plan) -> list[Row]:
    """Return a row for each place of the plan, with the present state of its trial; a trial may have several places."""
    rows, statuses = [], trial_statuses(plan)
    for member in plan.members:
        planned, status = plan.trials[member.id], statuses[member.id]
        folder, state, note = planned.folder, status.state, status.why
        if state in OVER and not is_current(folder.provenance() or {}):
            hint = f"`fewbits explain {folder.id[:HASH]}{runs_option(folder.path.parent)}` shows the difference"
            note = f"computed by another version of the code; {hint}"
        live = store.progress(folder) or {} if state is State.RUNNING else {}
        result = (folder.result() if state in OVER else None) or {}
        step = int(result.get("step", max(live.get("step", 0), store.reached(folder))))
        steps = planned.trial.training.steps
        kind = ", then ".join(kinds_of(folder.computed())) or None
        rows.append(Row(member.cell.sweep, member.cell.place, folder.path.name, state, step, steps, note, kind))
    return rows


def log(folder: RunFolder, lines: int, follow: bool) -> Iterator[str]:
    """Yield the last `lines` lines of a trial's log and, if `follow`, what is appended until the trial ends."""
    path = folder.path / store.LOG
    if not path.is_file():
        raise ValueError(f"{folder.path} has no log: only trials that a sweep has started have one")
    content = path.read_bytes()
    with path.open("rb") as file:
        file.seek(len(content) - sum(map(len, content.splitlines(keepends=True)[-lines:])))
        while True:
            running = follow and store.holder(folder) is not None  # before the read, so that no last line is missed
            if added := file.read():
                yield store.plain(added.decode(errors="replace"))
            if not running:
                return
            time.sleep(POLL)
