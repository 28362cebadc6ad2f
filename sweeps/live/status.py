"""Read how far the trials of a sweep are, watch them, and print the log of one trial (`fewbits status`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.common.store_folder import runs_option
from fewbits.common.terminal import Progress
from fewbits.common.wording import clock, plural
from fewbits.experiments.identity import is_current
from fewbits.experiments.machine_kinds import kind
from fewbits.experiments.storage.run_folder import HASH, RunFolder
from fewbits.experiments.training import flops_a_token
from fewbits.sweeps.planning.cost import work_of
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.progress import bar
from fewbits.sweeps.running.store import OVER, State
from fewbits.sweeps.running.trial_status import HALF_DONE, TrialStatus, counted, half_done, trial_statuses

EVERY = 2.0  # seconds between two updates of the display
POLL = 0.3  # seconds between two reads of a log
ENDED = (*OVER, State.FAILED, State.BLOCKED)  # states of trials that no longer wait or run


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
        live: dict[str, Any] = store.progress(folder) or {}
        result = (folder.result() if state in OVER else None) or {}
        running = live.get("step", 0) if state is State.RUNNING else 0
        step = int(result.get("step", max(running, store.reached(folder))))
        steps = planned.trial.training.steps
        rows.append(Row(member.cell.sweep, member.cell.place, folder.path.name, state, step, steps, note, kind(folder)))
    return rows


# -------------------------------------------------------------------------------- the log of a trial


def log(folder: RunFolder, lines: int, follow: bool) -> Iterator[str]:
    """Yield the last `lines` lines of a trial's log and, if `follow`, what is appended until the trial ends."""
    path = folder.path / store.LOG
    if not path.is_file():
        raise ValueError(f"{folder.path} has no log: only trials that a sweep has started have one")
    with path.open("rb") as file:
        file.seek(_end_of_log(path, lines))
        while True:
            running = follow and store.holder(folder) is not None  # before the read, so that no last line is missed
            if added := file.read():
                yield store.plain(added.decode(errors="replace"))
            if not running:
                return
            time.sleep(POLL)


def _end_of_log(path: Path, lines: int) -> int:
    """Return the position in bytes at which the file's last `lines` lines begin."""
    content = path.read_bytes()
    return len(content) - sum(map(len, content.splitlines(keepends=True)[-lines:]))


# -------------------------------------------------------------------------------- the progress of a sweep


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


def _show(display: Progress, plan: Plan, statuses: dict[str, TrialStatus]) -> None:
    running = [plan.trials[key] for key, status in statuses.items() if status.state is State.RUNNING]
    reports = {planned.id: store.progress(planned.folder) or {} for planned in running}
    counts = counted((status.state for status in statuses.values()), half_done(plan, statuses))
    texts = [f"{plural(len(statuses), 'trial')}: {counts}"]
    if speed := sum(report.get("tokens_per_second", 0.0) for report in reports.values()):
        texts.append(f"{speed:,.0f} tokens/s")
        texts.append(f"{clock(_seconds_left(plan, statuses, reports))} left")
    display.update("  ".join(texts), [bar(planned, reports[planned.id]) for planned in running], counts)


def _seconds_left(plan: Plan, statuses: dict[str, TrialStatus], reports: dict[str, dict[str, Any]]) -> float:
    """Return the FLOPs that the unfinished trials still need, divided by the FLOPs per second of the running ones.

    reports: the progress of each running trial, by trial id.
    """

    def left(planned: Planned) -> float:
        step = reports.get(planned.id, {}).get("step") or store.reached(planned.folder)
        return work_of(planned.trial) * (1 - step / planned.trial.training.steps)

    waiting = [planned for key, planned in plan.trials.items() if statuses[key].state not in ENDED]
    speeds = ((plan.trials[key].trial, report.get("tokens_per_second", 0.0)) for key, report in reports.items())
    return sum(map(left, waiting)) / sum(speed * flops_a_token(trial) for trial, speed in speeds)
