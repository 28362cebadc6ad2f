"""Plans as files of the store, `plans/STUDY-SWEEP-SCALE.json`: which trial stood in which place of a sweep, when it
was last asked for. By them one sees which results today's code or config would compute anew."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbits.experiments.atomic import write_json
from fewbits.sweeps.plan import Member, Plan

FOLDER = "plans"


@dataclass(frozen=True)
class Place:
    """A member as it was planned."""

    place: dict[str, str]  # arm, axes, seed
    id: str
    folder: str


def save_plan(plan: Plan) -> None:
    for runs, sweep, members in _parts(plan):
        path = runs / FOLDER / f"{members[0].study}-{sweep}-{members[0].scale}.json"
        rows = [
            {"place": member.cell.place, "id": member.id, "folder": plan.trials[member.id].folder.path.name}
            for member in members
        ]
        data = {"study": members[0].study, "sweep": sweep, "scale": members[0].scale, "members": rows}
        if _json(path) != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, data)


def saved_places(plan: Plan) -> dict[str, list[Place]]:
    """By sweep, as they were when last run; empty for one that never was."""
    found: dict[str, list[Place]] = {}
    for runs, sweep, members in _parts(plan):
        path = runs / FOLDER / f"{members[0].study}-{sweep}-{members[0].scale}.json"
        try:
            found[sweep] = [Place(**row) for row in _json(path)["members"]]
        except (KeyError, TypeError):  # never run, or not a plan: no result is known to be stale by it
            found[sweep] = []
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _parts(plan: Plan) -> list[tuple[Path, str, list[Member]]]:
    """Of each sweep that has members: the store, the name and the members."""
    parts = []
    for sweep in plan.sweeps:
        members = [member for member in plan.members if member.cell.sweep == sweep.name]
        if members:
            parts.append((plan.trials[members[0].id].folder.path.parent, sweep.name, members))
    return parts
