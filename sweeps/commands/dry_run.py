"""What a sweep would do: each arm with what it takes, each trial with its state, and what all of it takes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fewbits.sweeps.planning.arms import Share, arm_table
from fewbits.sweeps.planning.cost import ASSUMED_GPU, ASSUMED_SHARE, Speeds, assumed_seconds, disk
from fewbits.sweeps.planning.epochs import tokens_before, training_tokens
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.driver import finished
from fewbits.sweeps.running.progress import clock
from fewbits.sweeps.running.trial_status import TrialStatus, counted, table, trial_statuses

FEW = 40  # places up to which each trial is listed without being asked for
ASSUMED = f"computed from FLOPs at {ASSUMED_SHARE:.0%} of an {ASSUMED_GPU}'s BF16 peak, which is assumed"
MEASURED = "by the speeds measured here"


def describe(
    plan: Plan,
    parallel: int | None = None,
    backend: str = "ray",
    trials: bool = False,
    rerun: Mapping[str, str] | None = None,
) -> str:
    """Return the trials with their states (of a plan of few places, or on request), the arms and the totals.

    rerun: finished trials that run again, each with the reason.
    """
    found, rerun = trial_statuses(plan), rerun or {}
    each = [*_trials(plan, found, rerun), ""] if trials or rerun or len(plan.members) <= FEW else []
    return "\n".join([*each, *arm_table(_shares(plan)), "", *_totals(plan, found, parallel, backend, rerun)])


def _trials(plan: Plan, found: Mapping[str, TrialStatus], rerun: Mapping[str, str]) -> list[str]:
    rows, seen = [], set()
    for member in plan.members:
        planned = plan.trials[member.id]
        place = " ".join(f"{key}={value}" for key, value in member.cell.place.items())
        again = "  (the same trial as above)" if member.id in seen else ""
        seen.add(member.id)
        told = _told(planned, found[member.id])
        told += f", runs again: {rerun[member.id]}" if member.id in rerun else ""
        rows.append((member.cell.sweep, place, planned.folder.path.name, told + again))
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
    """Return how long the whole trial takes, and how that is known."""
    measured = speeds.seconds(planned)
    if measured is not None:
        return measured, MEASURED
    return assumed_seconds(planned.trial, planned.resources), ASSUMED


def _told(planned: Planned, standing: TrialStatus) -> str:
    state = standing.state
    if state is store.State.BLOCKED:
        return f"blocked: {standing.why}"
    if finished(planned):
        return str(state)
    if state in store.OVER:
        return f"{state}, but again for checkpoints of steps {', '.join(map(str, sorted(planned.keep)))}"
    step = store.reached(planned.folder)
    return f"{state}, goes on from step {step}" if step and state is not store.State.RUNNING else str(state)


def _totals(
    plan: Plan, found: Mapping[str, TrialStatus], parallel: int | None, backend: str, rerun: Mapping[str, str]
) -> list[str]:
    missing = [
        one for key, one in plan.trials.items() if key in rerun or (not finished(one) and not found[key].for_good)
    ]
    lines = [f"{len(plan.trials)} trials: {counted(standing.state for standing in found.values())}"]
    if not missing:
        return [*lines, "nothing to run"]
    slots = parallel or _slots(missing)
    speeds = _speeds(plan)
    total, line = 0.0, dict.fromkeys(plan.trials, 0.0)  # until it is done, its parents first
    sources: dict[str, None] = {}
    for planned in missing:
        seconds, source = _seconds(planned, speeds)
        if seconds is None:
            lines.append("time not known: nothing like these trials has run in this store yet")
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
    """Return how many of them this machine runs at once; of trials on GPUs one, as if it had one GPU."""
    if any(one.resources.gpus for one in planned):
        return 1
    cpus = max((one.resources.cpus or 1) * one.resources.ranks for one in planned)
    return max(1, int(len(os.sched_getaffinity(0)) // cpus))
