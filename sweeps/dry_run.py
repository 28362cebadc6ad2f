"""What a sweep would do: each trial with its state, and what all of it takes."""

from __future__ import annotations

import os
from collections import Counter

from fewbits.sweeps import store
from fewbits.sweeps.cost import Speeds, disk
from fewbits.sweeps.driver import finished
from fewbits.sweeps.plan import Plan, Planned
from fewbits.sweeps.progress import clock


def describe(plan: Plan, parallel: int | None = None) -> str:
    rows, seen = [], set()
    for member in plan.members:
        planned = plan.trials[member.id]
        place = " ".join(f"{key}={value}" for key, value in member.cell.place.items())
        again = "  (the same trial as above)" if member.id in seen else ""
        seen.add(member.id)
        rows.append((member.cell.sweep, place, planned.folder.path.name, _standing(planned) + again))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:{widths[2]}}  {row[3]}" for row in rows]
    return "\n".join([*lines, "", *_totals(plan, parallel)])


def _standing(planned: Planned) -> str:
    state = store.state(planned.folder)
    if finished(planned):
        return str(state)
    if state in store.OVER:
        return f"{state}, but again for checkpoints of steps {', '.join(map(str, sorted(planned.keep)))}"
    step = store.reached(planned.folder)
    return f"{state}, goes on from step {step}" if step and state is not store.State.RUNNING else str(state)


def _totals(plan: Plan, parallel: int | None) -> list[str]:
    counts = Counter(str(store.state(planned.folder)) for planned in plan.trials.values())
    missing = [planned for planned in plan.trials.values() if not finished(planned)]
    lines = [f"{len(plan.trials)} trials: " + ", ".join(f"{count} {state}" for state, count in counts.items())]
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
        seconds *= _part_left(planned)
        total += seconds
        line[planned.id] = seconds + (line[planned.parent] if planned.parent else 0.0)
    else:
        longest = max(line.values())
        lines.append(f"about {clock(max(total / slots, longest))}, {slots} at a time, by the speeds measured here")
    lines.append(f"{disk(missing) / 1e9:.1f} GB of checkpoints")
    return lines


def _part_left(planned: Planned) -> float:
    return 1 - store.reached(planned.folder) / planned.trial.training.steps


def _slots(planned: list[Planned]) -> int:
    """On this machine."""
    cpus = max((one.resources.cpus or 1) * one.resources.ranks for one in planned)
    return max(1, int(len(os.sched_getaffinity(0)) // cpus))
