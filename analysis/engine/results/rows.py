"""Make the rows of the table of trials: a place's labels, its trial's state, and all numbers in result.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fewbits.experiments.environment import Computed
from fewbits.experiments.identity import is_current
from fewbits.experiments.storage.results import numbers, with_stored
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.trial import Trial
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.cost import parameters_of
from fewbits.sweeps.planning.plan import Member

LABELS = ("study", "scale", "sweep", "arm", "axes", "seed", "id")  # a place's labels; id: the trial's id
# The columns that `columns` returns in addition to measured numbers.
STANDING = ("folder", "state", "step", "steps", "note", "model", "parameters", "recipe", "computed")
OTHER_CODE = "computed by other code than today's"
_NO_NUMBERS = ("id", "name", "status", "step", "evaluated")  # entries of result.json that are not measured numbers

Row = Mapping[str, Any]


def labels(member: Member) -> dict[str, Any]:
    """Return {column: value} of a place: LABELS and, unless it has the name of a label, a column for each axis.

    axes: the pairs (axis, value) of all axes. id: the id of the trial.
    """
    cell = member.cell
    values = (member.study, member.scale, cell.sweep, cell.arm, cell.axes, cell.seed, member.id)
    columns = dict(zip(LABELS, values, strict=True))
    return columns | {axis: value for axis, value in cell.axes if axis not in columns}


@dataclass(frozen=True)
class Standing:
    """How far a trial is, and its measured numbers if it is finished."""

    state: str  # planned, running, done, failed or diverged
    step: int
    note: str  # why there is no result, or that the result was computed by other code than today's
    computed: Computed  # the environments that computed its steps
    numbers: Mapping[str, float]  # those of result.json and of later evaluations of the run


def standing(folder: RunFolder) -> Standing:
    """Return the standing of the trial in this run folder."""
    state = store.state(folder)
    over = state in store.OVER
    result = with_stored(folder.path, folder.result() or {}) if over else {}
    failure = store.failure(folder) if state is store.State.FAILED else None
    note = failure.reason if failure else ""
    if over and not is_current(folder.provenance() or {}):
        note = OTHER_CODE
    elif state is store.State.PLANNED:
        note = "missing: not run yet, or not finished"
    measured = numbers({k: v for k, v in result.items() if k not in _NO_NUMBERS})
    return Standing(
        str(state),
        int(result.get("step", store.reached(folder))),
        note,
        folder.computed(),
        {name: float("nan") if value is None else float(value) for name, value in measured},
    )


def columns(folder: RunFolder, trial: Trial, at: Standing) -> dict[str, Any]:
    """Return {column: value} of a trial: STANDING (state, step …) and, if finished, all measured numbers."""
    return {
        "folder": str(folder.path),
        "state": at.state,
        "step": at.step,
        "steps": trial.training.steps,
        "note": at.note,
        "model": trial.model.name,
        "parameters": parameters_of(trial.model),
        "recipe": trial.recipe.label,
        "computed": at.computed,
        **at.numbers,
    }


def treatment(arm: str, axes: Iterable[tuple[str, str]]) -> str:
    """Return the name of an arm with axis values, without the seed: `ARM, AXIS VALUE, AXIS VALUE`."""
    return arm + "".join(f", {axis} {value}" for axis, value in axes)


def place_name(row: Row) -> str:
    """Return the name of a place: arm (or sweep, if it has no arm), axis values and seed."""
    return f"{treatment(row['arm'] or row['sweep'], row['axes'])}, seed {row['seed']}"
