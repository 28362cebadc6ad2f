"""Make the rows of the table of trials: a place's labels, its trial's state, and all numbers in result.json.

Two trials are compared only if they were computed in the same environment: the kind of machine, the kernel backend, the
version of torch, and the environment variables that change how sums are rounded. Other rounding errors can look like a
small effect of an arm.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fewbits.common.wording import plural
from fewbits.experiments.environment import COMPARED_KEYS, UNKNOWN, Computed, alike, describe_kinds, kinds_of
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

NAMES = {  # the plural names of the properties of an environment (COMPARED_KEYS), for messages
    "kind": "kinds of machine",
    "backend": "backends",
    "torch": "versions of torch",
    "limits": "instruction limits",
}

Row = Mapping[str, Any]


def labels(member: Member) -> dict[str, Any]:
    """Return {column: value} of a place: LABELS and, unless it has the name of a label, a column for each axis."""
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


def why_not_compared(row: Row, other: Row, usual: str | None) -> str | None:
    """Say why two finished trials with the same seed are not compared; None if they can be, or if one is unfinished."""
    ours, theirs = row["computed"], other["computed"]
    finished = row["state"] in store.OVER and other["state"] in store.OVER
    if not finished or row["id"] == other["id"] or alike(ours, theirs):
        return None
    names = [treatment(trial["arm"], trial["axes"]) for trial in (row, other)]
    ran = f"{names[0]} ran on {describe_kinds(ours, [theirs])}, {names[1]} on {describe_kinds(theirs, [ours])}"
    return f"seed {row['seed']}: {ran}, so the two are not compared; {_remedy(usual)}"


def usual_kind(rows: Iterable[Row]) -> str | None:
    by_trial = {row["id"]: row["computed"] for row in rows}
    counts = Counter(kind for computed in by_trial.values() for kind in kinds_of(computed))
    return min(counts, key=lambda kind: (-counts[kind], kind)) if counts else None


def unlike_within_seeds(rows: Sequence[Row]) -> list[str]:
    """Return lines of text about differences in the environment between finished trials with the same seed."""
    finished = {row["id"]: row for row in rows if row["state"] in store.OVER}
    remedy = _remedy(usual_kind(finished.values()))
    lines = []
    for at, key in enumerate(COMPARED_KEYS):
        seeds: dict[int, Counter[str]] = defaultdict(Counter)
        for row in finished.values():
            # A run without a record of its environment has the kind UNKNOWN, and no value of the other properties.
            unknown = [UNKNOWN] if key == "kind" else []
            seeds[row["seed"]].update({str(part[at]) for part in row["computed"]} or unknown)
        differing = {seed: counts for seed, counts in sorted(seeds.items()) if len(counts) > 1}
        if differing:
            total = sum(differing.values(), Counter[str]())
            each = ", ".join(f"{value} ({plural(total[value], 'trial')})" for value in sorted(total))
            within = f"{'seed' if len(differing) == 1 else 'seeds'} {', '.join(map(str, differing))}"
            differ = "trials that differ in this are not compared"
            lines.append(f"{len(total)} {NAMES[key]} within {within}: {each}; {differ}; {remedy}")
    for row in finished.values():
        if len(row["computed"]) > 1:
            computed = f"{str(row['folder']).rpartition('/')[2]} was computed on {describe_kinds(row['computed'])}"
            lines.append(f"{computed}, so nothing is compared with it; {remedy}")
    return lines


def _remedy(usual: str | None) -> str:
    """Return a text that tells how to run the deviating trials again. usual: the kind of machine that it names."""
    machines = usual or "machines of one kind"
    return f"to run the deviating trials again: move their run folders away, then `fewbits sweep …` on {machines}"
