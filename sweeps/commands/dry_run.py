"""Describe what a sweep would do: each arm with its cost, each trial with its state, and the totals."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fewbits.common.progress import clock
from fewbits.sweeps.planning.arms import Share, arm_table
from fewbits.sweeps.planning.cost import ASSUMED_GPU, ASSUMED_SHARE, Speeds, assumed_seconds, disk
from fewbits.sweeps.planning.epochs import tokens_before, training_tokens
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.driver import finished
from fewbits.sweeps.running.trial_status import TrialStatus, counted, table, trial_statuses

FEW = 40  # the largest number of places at which each trial is listed without --trials
ASSUMED = f"computed from FLOPs at an assumed {ASSUMED_SHARE:.0%} of an {ASSUMED_GPU}'s BF16 peak"
MEASURED = "from speeds measured in this store"


def describe(
    plan: Plan,
    parallel: int | None = None,
    backend: str = "ray",
    trials: bool = False,
    rerun: Mapping[str, str] | None = None,
) -> str:
    """Return the trials with their states (of a small plan, or if `trials`), the table of arms and the totals.

    rerun: finished trials that run again, each with the reason.
    """
    statuses, rerun = trial_statuses(plan), rerun or {}
    each = [*_trials(plan, statuses, rerun), ""] if trials or rerun or len(plan.members) <= FEW else []
    return "\n".join([*each, *arm_table(_shares(plan)), "", *_totals(plan, statuses, parallel, backend, rerun)])


def _trials(plan: Plan, statuses: Mapping[str, TrialStatus], rerun: Mapping[str, str]) -> list[str]:
    rows, seen = [], set()
    for member in plan.members:
        planned = plan.trials[member.id]
        place = " ".join(f"{key}={value}" for key, value in member.cell.place.items())
        again = "  (the same trial as above)" if member.id in seen else ""
        seen.add(member.id)
        text = _describe_status(planned, statuses[member.id])
        text += f", runs again: {rerun[member.id]}" if member.id in rerun else ""
        rows.append((member.cell.sweep, place, planned.folder.path.name, text + again))
    return table(rows)


def _shares(plan: Plan) -> list[Share]:
    speeds = _speeds(plan)
    return [
        Share(
            member.cell,
            planned.trial,
            member.id,
            tokens_before(planned.trial, planned.parent, plan.trials),
            training_tokens(planned.trial.data, planned.runtime.cache),
            _seconds(planned, speeds)[0],
            disk([planned]),
        )
        for member in plan.members
        for planned in [plan.trials[member.id]]
    ]


def _speeds(plan: Plan) -> Speeds:
    return Speeds(next(iter(plan.trials.values())).folder.path.parent)


def _seconds(planned: Planned, speeds: Speeds) -> tuple[float | None, str]:
    """Return the seconds that the whole trial takes, and the source of that number."""
    measured = speeds.seconds(planned)
    if measured is not None:
        return measured, MEASURED
    return assumed_seconds(planned.trial, planned.resources), ASSUMED


def _describe_status(planned: Planned, status: TrialStatus) -> str:
    state = status.state
    if state is store.State.BLOCKED:
        return f"blocked: {status.why}"
    if finished(planned):
        return str(state)
    if state in store.OVER:
        return f"{state}, runs again for the checkpoints of steps {', '.join(map(str, sorted(planned.keep)))}"
    step = store.reached(planned.folder)
    return f"{state}, resumes from step {step}" if step and state is not store.State.RUNNING else str(state)


def _totals(
    plan: Plan, statuses: Mapping[str, TrialStatus], parallel: int | None, backend: str, rerun: Mapping[str, str]
) -> list[str]:
    missing = [
        trial
        for key, trial in plan.trials.items()
        if key in rerun or (not finished(trial) and not statuses[key].for_good)
    ]
    lines = [f"{len(plan.trials)} trials: {counted(status.state for status in statuses.values())}"]
    if not missing:
        return [*lines, "nothing to run"]
    slots = parallel or _slots(missing)
    speeds = _speeds(plan)
    total, line = 0.0, dict.fromkeys(plan.trials, 0.0)  # line: seconds until a trial is done, its parents included
    sources: dict[str, None] = {}
    for planned in missing:
        seconds, source = _seconds(planned, speeds)
        if seconds is None:
            lines.append("time unknown: no similar trial has run in this store yet")
            break
        sources[source] = None
        seconds *= 1.0 if planned.id in rerun else _part_left(planned)
        total += seconds
        line[planned.id] = seconds + (line[planned.parent] if planned.parent else 0.0)
    else:
        whole = clock(speeds.start(backend) + max(total / slots, max(line.values())))
        lines.append(f"about {whole}, {slots} at a time, {'; '.join(sources)}")
    lines.append(f"{disk(missing) / 1e9:.1f} GB of checkpoints")
    return lines


def _part_left(planned: Planned) -> float:
    return 1 - store.reached(planned.folder) / planned.trial.training.steps


def _slots(planned: list[Planned]) -> int:
    """Return how many of the trials this machine runs at once; one if they need GPUs, as if it had one GPU."""
    if any(trial.resources.gpus for trial in planned):
        return 1
    cpus = max((trial.resources.cpus or 1) * trial.resources.ranks for trial in planned)
    return max(1, int(len(os.sched_getaffinity(0)) // cpus))
