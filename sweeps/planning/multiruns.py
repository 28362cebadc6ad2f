"""Make the sweep of a multirun (`fewbits train --multirun`): its name, and a cell for each job of Hydra's sweeper.

A job is Hydra's word for the overrides of one trial. Hydra's own sweeper makes all jobs at once, as a grid. Other
sweepers, such as Optuna's, make a few jobs at a time and choose them by earlier results. In both cases all jobs are one
sweep with one name, which is stored as one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fewbits.experiments.composition import override_values
from fewbits.sweeps.planning.expand import Cell
from fewbits.sweeps.planning.plan import Plan
from fewbits.sweeps.planning.stored_plans import place_of, selection_hash
from fewbits.sweeps.planning.sweep import SEED, Sweep

NAME = "hydra.job.name"  # Hydra's setting for the name of a multirun
MODE = "hydra.mode=MULTIRUN"
STUDY = "train"  # the MLflow experiment of all multiruns


def multirun_name(overrides: Sequence[str]) -> str:
    """Return the name of a multirun: the value of `hydra.job.name` or, without it, `multirun-HASH`.

    HASH is a hash of the overrides without those that set paths.
    """
    named = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == NAME]
    if named:
        return named[-1].strip("\"'")
    return f"multirun-{selection_hash([text for text in overrides if text != MODE])}"


def fixed_keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys that these overrides set to a single value: they are equal in all trials, so they are no axes.

    For example, `seed=1` has a single value, and `seed=0,1` has two.
    """
    return {text.partition("=")[0].lstrip("+") for text in overrides if "=" in text and len(override_values(text)) == 1}


def cells(name: str, jobs: Sequence[Sequence[str]], fixed: set[str], always: Sequence[str] = ()) -> list[Cell]:
    """Return a cell for each of Hydra's jobs, in the order of the jobs.

    The axes of a cell are those keys of its job that are neither `seed` nor in `fixed`.

    name: the multirun's name. jobs: each job's overrides. fixed: keys with the same value in all jobs. always: further
    overrides of every trial, which Hydra does not pass to jobs.
    """
    made = []
    for job in jobs:
        keyed = dict(override.partition("=")[::2] for override in job)
        seed = keyed.get(SEED, "0")
        if not seed.isdecimal():
            raise ValueError(f"{SEED}={seed}: expected a whole number, 0 or more")
        axes = tuple((key, value) for key, value in keyed.items() if key.lstrip("+") not in {*fixed, SEED})
        overrides = (*always, *(f"{key}={value}" for key, value in keyed.items()))
        made.append(Cell(name, "", axes, int(seed), overrides))
    return made


def sweep_of(name: str, grid: Sequence[Cell]) -> Sweep:
    """Return a sweep called `name` whose axes have all values that occur in the cells of `grid`."""
    axes: dict[str, dict[str, list[str]]] = {}
    for key, value in (axis for cell in grid for axis in cell.axes):
        axes.setdefault(key, {})[value] = [f"{key}={value}"]
    return Sweep(name, study=STUDY, axes=axes)


def joined(earlier: Plan | None, now: Plan) -> Plan:
    """Return a plan with the places and trials of both plans; `now` if `earlier` is None.

    At a place that both plans have, the trial of `now` is used.
    """
    if earlier is None:
        return now
    members = {place_of(member): member for plan in (earlier, now) for member in plan.members}
    wanted = {member.id for member in members.values()}
    trials = {key: planned for plan in (earlier, now) for key, planned in plan.trials.items() if key in wanted}
    sweep = sweep_of(now.sweeps[0].name, [member.cell for member in members.values()])
    return replace(now, sweeps=(sweep,), members=tuple(members.values()), trials=trials)
