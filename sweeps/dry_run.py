"""What a sweep would do: each trial with its state, and what all of it takes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fewbits.sweeps import store
from fewbits.sweeps.cost import Speeds, disk
from fewbits.sweeps.driver import finished
from fewbits.sweeps.plan import Plan, Planned
from fewbits.sweeps.progress import clock
from fewbits.sweeps.standing import Standing, counted, standings, table


def describe(
    plan: Plan, parallel: int | None = None, backend: str = "ray", rerun: Mapping[str, str] | None = None
) -> str:
    """Return the plan as text. rerun: finished trials that run again, each with the reason."""
    rerun = rerun or {}
    rows, seen, found = [], set(), standings(plan)
    for member in plan.members:
        planned = plan.trials[member.id]
        place = " ".join(f"{key}={value}" for key, value in member.cell.place.items())
        again = "  (the same trial as above)" if member.id in seen else ""
        seen.add(member.id)
        told = _told(planned, found[member.id])
        told += f", runs again: {rerun[member.id]}" if member.id in rerun else ""
        rows.append((member.cell.sweep, place, planned.folder.path.name, told + again))
    return "\n".join([*table(rows), "", *_totals(plan, found, parallel, backend, rerun)])


def _told(planned: Planned, standing: Standing) -> str:
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
    plan: Plan, found: Mapping[str, Standing], parallel: int | None, backend: str, rerun: Mapping[str, str]
) -> list[str]:
    missing = [
        one for key, one in plan.trials.items() if key in rerun or (not finished(one) and not found[key].for_good)
    ]
    lines = [f"{len(plan.trials)} trials: {counted(standing.state for standing in found.values())}"]
    if not missing:
        return [*lines, "nothing to run"]
    slots = parallel or _slots(missing)
    speeds = Speeds(missing[0].folder.path.parent)
    total, line = 0.0, dict.fromkeys(plan.trials, 0.0)  # until it is done, its parents first
    for planned in missing:
        seconds = speeds.seconds(planned)
        if seconds is None:
            lines.append("time not known: nothing like these trials has run in this store yet")
            break
        seconds *= 1.0 if planned.id in rerun else _part_left(planned)
        total += seconds
        line[planned.id] = seconds + (line[planned.parent] if planned.parent else 0.0)
    else:
        longest = max(line.values())
        start = speeds.start(backend)
        lines.append(
            f"about {clock(start + max(total / slots, longest))}, {slots} at a time, by the speeds measured here"
        )
    lines.append(f"{disk(missing) / 1e9:.1f} GB of checkpoints")
    return lines


def _part_left(planned: Planned) -> float:
    return 1 - store.reached(planned.folder) / planned.trial.training.steps


def _slots(planned: list[Planned]) -> int:
    """On this machine."""
    cpus = max((one.resources.cpus or 1) * one.resources.ranks for one in planned)
    return max(1, int(len(os.sched_getaffinity(0)) // cpus))
