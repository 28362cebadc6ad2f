"""Show a sweep's progress from the files of the store, like the sweep's own display (`fewbits status --watch`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fewbits.common.progress import Progress, clock
from fewbits.common.wording import plural
from fewbits.experiments.training import flops_a_token
from fewbits.sweeps.planning.cost import work_of
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.progress import bar
from fewbits.sweeps.running.store import OVER, State
from fewbits.sweeps.running.trial_status import TrialStatus, counted, half_done, trial_statuses

EVERY = 2.0  # seconds between two updates of the display
ENDED = (*OVER, State.FAILED, State.BLOCKED)  # states of trials that no longer wait or run


def watch(
    plan: Callable[[], Plan], every: float = EVERY, display: Progress | None = None, pause: Any = time.sleep
) -> dict[str, TrialStatus]:
    """Show the progress until all trials have ended, and return their statuses by trial id.

    plan: a function that returns the current plan; it is called at each update, since a multirun adds trials to its
    plan. every: seconds between updates. display: where the progress is shown; None: on a new display. pause: called
    with `every` to wait; tests replace it.
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
    """Return an estimate of the seconds until all trials have ended.

    It is the FLOPs that the unfinished trials still need, divided by the FLOPs per second of the running trials.

    reports: the progress of each running trial, by trial id.
    """

    def left(planned: Planned) -> float:
        step = reports.get(planned.id, {}).get("step") or store.reached(planned.folder)
        return work_of(planned.trial) * (1 - step / planned.trial.training.steps)

    waiting = [planned for key, planned in plan.trials.items() if statuses[key].state not in ENDED]
    speeds = ((plan.trials[key].trial, report.get("tokens_per_second", 0.0)) for key, report in reports.items())
    return sum(map(left, waiting)) / sum(speed * flops_a_token(trial) for trial, speed in speeds)
