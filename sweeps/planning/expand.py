"""Expand a sweep or a multirun to its cells. A cell is a place in the grid with the overrides of its trial.

The cells follow from the sweep file alone; no data are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fewbits.experiments.composition import override_values, spelled
from fewbits.sweeps.planning.sweep import ARM, SEED, START, Sweep, as_list, start_of

MULTIRUNS = "train"  # the study of all multiruns, which is their MLflow experiment


@dataclass(frozen=True)
class Cell:
    """A place in the sweep's grid (an arm, a value for each of its axes, a seed), with the overrides of its trial."""

    sweep: str  # the sweep's name
    arm: str  # the arm's name
    axes: tuple[tuple[str, str], ...]  # pairs (axis, name of its value), the name as text of Hydra's grammar
    seed: int
    overrides: tuple[str, ...]  # all overrides of the trial; each key occurs once
    parent: Cell | None = None  # the cell from whose trial this cell's trial branches; None: no cell of the sweep
    at: float | None = None  # the step of the parent, or fraction of its steps, where the trial starts: see `Arm.at`

    @property
    def place(self) -> dict[str, str]:
        """The values of `arm` (if the arm has a name), each axis and `seed`, which identify the cell in its sweep."""
        return ({ARM: self.arm} if self.arm else {}) | dict(self.axes) | {SEED: str(self.seed)}

    @property
    def title(self) -> str:
        """The cell's name in messages, for example `sweep block, arm mor, seed 0`."""
        return ", ".join([f"sweep {self.sweep}", *(f"{key} {value}" for key, value in self.place.items())])


def spell(place: Mapping[str, str]) -> str:
    """Return a place as text, for example `arm=mor seed=0`."""
    return " ".join(f"{key}={value}" for key, value in place.items())


def expand(sweep: Sweep, extra: tuple[str, ...] = ()) -> list[Cell]:
    """Return the sweep's cells, sorted by arm, then by the values of the axes, then by seed, in the file's order.

    extra: further overrides for every trial. Raise ValueError if one of them sets an axis of the sweep, or all that
    distinguishes two of an axis's values.
    """
    fixed = {override.partition("=")[0] for override in extra}
    for group in sweep.groups:
        values = [
            [o for texts in bundles for o in texts] for bundles in zip(*map(dict.values, group.values()), strict=True)
        ]
        left = {tuple(o for o in texts if o.partition("=")[0] not in fixed) for texts in values}
        keys = fixed & {*group, *(o.partition("=")[0] for texts in values for o in texts)}
        if fixed & group.keys() or len(left) < len({*map(tuple, values)}):
            raise ValueError(
                f"{', '.join(sorted(keys))}: axis {' and '.join(group)} of sweep {sweep.name} has other values, so no "
                f"override may set it: choose the axis's values with axes={{{next(iter(group))}:…}}"
            )
    return [
        _cell(sweep, arm, axes, seed, extra)
        for arm in sweep.arms
        if sweep.runs_at(arm)
        for axes in _combinations(sweep, arm)
        for seed in sweep.seeds
        if not _excluded(sweep, arm, axes, seed)
    ]


def _cell(sweep: Sweep, name: str, axes: Mapping[str, str], seed: int, extra: tuple[str, ...]) -> Cell:
    arm = sweep.arms[name]
    chosen = [o for group in sweep.groups for axis, values in group.items() if axis in axes for o in values[axes[axis]]]
    starts = [start_of(override) for override in chosen if override.startswith(START)]
    overrides = [*sweep.overrides, *sweep.size, *arm.overrides, *(o for o in chosen if not o.startswith(START))]
    overrides += [f"seed={seed}", *extra]
    return Cell(
        sweep=sweep.name,
        arm=name,
        axes=tuple(axes.items()),
        seed=seed,
        # The last override of a key wins here, since Hydra refuses some repeated keys.
        overrides=tuple({override.partition("=")[0]: override for override in overrides}.values()),
        parent=None if arm.parent is None else _parent(sweep, name, arm.parent, axes, seed, extra),
        at=starts[-1] if starts else arm.at,
    )


def _parent(sweep: Sweep, child: str, name: str, axes: Mapping[str, str], seed: int, extra: tuple[str, ...]) -> Cell:
    subject = f"sweep {sweep.name}: arm {child} starts from arm {name}, which"
    if not sweep.runs_at(name):
        raise ValueError(
            f"{subject} is not trained at scale {sweep.scale}: see arms.{name}.scales, arms.{child}.scales"
        )
    of_parent = _combinations(sweep, name)
    own = {axis: value for axis, value in axes.items() if axis in of_parent[0]}
    if missing := [axis for axis in of_parent[0] if axis not in own]:
        raise ValueError(f"{subject} has axes that arm {child} does not have: {', '.join(missing)}")
    if _excluded(sweep, name, own, seed):
        raise ValueError(f"{subject} is excluded at {own | {SEED: seed}}: also exclude arm {child} there")
    return _cell(sweep, name, own, seed, extra)


def _combinations(sweep: Sweep, arm: str) -> list[dict[str, str]]:
    """Return all combinations of the values of the arm's axes, each as a mapping of axes to names of values.

    Zipped axes are combined only by position: the first value of one with the first value of the other, and so on.
    """
    chosen, groups = sweep.arms[arm].axes, []
    for group in sweep.groups:
        names = {axis: list(values) for axis, values in group.items() if chosen is None or axis in chosen}
        if names:
            groups.append([dict(zip(names, values, strict=True)) for values in zip(*names.values(), strict=True)])
    return [{axis: value for part in parts for axis, value in part.items()} for parts in itertools.product(*groups)]


def _excluded(sweep: Sweep, arm: str, axes: Mapping[str, str], seed: int) -> bool:
    place: dict[str, Any] = {ARM: arm, **axes, SEED: str(seed)}
    return any(
        all(
            key in place and any(place[key] in (spelled(value), str(value)) for value in as_list(chosen))
            for key, chosen in exclusion.items()
        )
        for exclusion in sweep.exclude
    )


# -------------------------------------------------------------------------------- multiruns


def fixed_keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys that these overrides set to a single value: they are equal in all trials, so they are no axes."""
    return {text.partition("=")[0].lstrip("+") for text in overrides if "=" in text and len(override_values(text)) == 1}


def cells_of_jobs(name: str, jobs: Sequence[Sequence[str]], fixed: set[str], always: Sequence[str] = ()) -> list[Cell]:
    """Return a cell for each job of a multirun (`fewbits train --multirun`), in the order of the jobs.

    A job is Hydra's word for the overrides of one trial. The axes of a cell are those keys of its job that are neither
    `seed` nor in `fixed`. name: the multirun's name. always: further overrides of every trial, which jobs do not have.
    """
    made = []
    for job in jobs:
        keyed = dict(override.partition("=")[::2] for override in job)
        seed = keyed.get(SEED, "0")
        if not seed.isdecimal():
            raise ValueError(f"{SEED}={seed}: expected a whole number, 0 or more")
        axes = tuple((key, value) for key, value in keyed.items() if key.lstrip("+") not in {*fixed, SEED})
        made.append(Cell(name, "", axes, int(seed), (*always, *(f"{key}={value}" for key, value in keyed.items()))))
    return made


def sweep_of(name: str, grid: Sequence[Cell]) -> Sweep:
    """Return a sweep called `name` whose axes have all values that occur in the cells of `grid`."""
    axes: dict[str, dict[str, list[str]]] = {}
    for key, value in (axis for cell in grid for axis in cell.axes):
        axes.setdefault(key, {})[value] = [f"{key}={value}"]
    return Sweep(name, study=MULTIRUNS, axes=axes)
