"""Make the rows of the table of trials: a place's labels, the state of its trial, and every number of the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fewbits.experiments.identity import computed_by_todays_sources
from fewbits.sweeps.planning.cost import parameters_of
from fewbits.sweeps.planning.plan import Member, Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.machine_kinds import computed

LABELS = ("study", "scale", "sweep", "arm", "axes", "seed", "id")  # the labels of a place; each axis is a column, too
STANDING = ("folder", "state", "step", "steps", "stale", "note", "model", "parameters", "recipe", "computed")
OTHER_CODE = "computed by other code than today's"
_NO_NUMBERS = ("id", "name", "status", "step", "evaluated")  # entries of result.json that are not measured numbers

Row = Mapping[str, Any]


def labels(member: Member) -> dict[str, Any]:
    """Return the labels of a place, and the values of its axes."""
    cell = member.cell
    columns = {
        "study": member.study,
        "scale": member.scale,
        "sweep": cell.sweep,
        "arm": cell.arm,
        "axes": cell.axes,
        "seed": cell.seed,
        "id": member.id,
    }
    return columns | {axis: value for axis, value in cell.axes if axis not in columns}


def standing(planned: Planned, old: str) -> dict[str, Any]:
    """Return the state of a trial and every number of its result.

    old: the name of the run folder of another trial that a stored plan had at this place, or "".
    """
    state = store.state(planned.folder)
    over = state in store.OVER
    result = (planned.folder.result() or {}) if over else {}
    failure = store.failure(planned.folder) if state is store.State.FAILED else None
    note = failure.reason if failure else ""
    stale = old if old and not over else ""
    if stale:
        note = f"stale: {old} was computed by other code or another config"
    elif over and not computed_by_todays_sources(planned.folder.provenance() or {}):
        note = OTHER_CODE
    elif state is store.State.PLANNED:
        note = "missing: not run, or not to its end"
    model = planned.trial.model
    columns = {
        "folder": str(planned.folder.path),
        "state": str(state),
        "step": int(result.get("step", store.reached(planned.folder))),
        "steps": planned.trial.training.steps,
        "stale": stale,
        "note": note,
        "model": model.name,
        "parameters": parameters_of(model),
        "recipe": planned.trial.recipe.name,
        "computed": computed(planned.folder),
    }
    return columns | dict(_numbers({k: v for k, v in result.items() if k not in _NO_NUMBERS}))


def _numbers(value: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, float]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _numbers(item, f"{where}{key}.")
        elif item is None or isinstance(item, int | float):
            yield f"{where}{key}", float("nan") if item is None else float(item)


def treatment(arm: str | None, axes: Iterable[tuple[str, str]]) -> str:
    """Return the name of an arm with one combination of axis values, without the seed."""
    return str(arm) + "".join(f", {axis} {value}" for axis, value in axes)


def place_name(row: Row) -> str:
    """Return the name of a place: arm, axis values and seed."""
    return f"{treatment(row['arm'] or row['sweep'], row['axes'])}, seed {row['seed']}"
