"""Expand a sweep to its cells. A cell is a place in the sweep's grid with the overrides of its trial.

The cells follow from the sweep file alone; no data are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fewbits.experiments.composition import spelled
from fewbits.sweeps.planning.sweep import ARM, SEED, START, Sweep, as_list, start_of


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

    extra: further overrides for every trial. Raise ValueError if one of them sets an axis of the sweep.
    """
    for axis in (axis for group in sweep.groups for axis in group):
        if axis in [override.partition("=")[0] for override in extra]:
            raise ValueError(
                f"{axis} is an axis of sweep {sweep.name}, so no override may set it: choose its values with "
                f"axes={{{axis}:[…]}}"
            )
    return [cell for arm in sweep.arms if sweep.runs_at(arm) for cell in _cells(sweep, arm, extra)]


def _cells(sweep: Sweep, arm: str, extra: tuple[str, ...]) -> Iterator[Cell]:
    for axes in _combinations(sweep, arm):
        for seed in sweep.seeds:
            if not _excluded(sweep, arm, axes, seed):
                yield _cell(sweep, arm, axes, seed, extra)


def _cell(sweep: Sweep, name: str, axes: Mapping[str, str], seed: int, extra: tuple[str, ...]) -> Cell:
    arm = sweep.arms[name]
    chosen = [o for group in sweep.groups for axis, values in group.items() if axis in axes for o in values[axes[axis]]]
    starts = [start_of(override) for override in chosen if override.startswith(START)]
    overrides = [*sweep.overrides, *sweep.size, *arm.overrides, *(o for o in chosen if not o.startswith(START))]
    return Cell(
        sweep=sweep.name,
        arm=name,
        axes=tuple(axes.items()),
        seed=seed,
        overrides=_last_wins([*overrides, f"seed={seed}", *extra]),
        parent=None if arm.parent is None else _parent(sweep, name, axes, seed, extra),
        at=starts[-1] if starts else arm.at,
    )


def _parent(sweep: Sweep, child: str, axes: Mapping[str, str], seed: int, extra: tuple[str, ...]) -> Cell:
    name = sweep.arms[child].parent
    assert name is not None
    subject = f"sweep {sweep.name}: arm {child} starts from arm {name}, which"
    if not sweep.runs_at(name):
        raise ValueError(
            f"{subject} is not trained at scale {sweep.scale}: add it to arms.{name}.scales, or leave it out of "
            f"arms.{child}.scales"
        )
    own = {axis: value for axis, value in axes.items() if _has(sweep, name, axis)}
    if missing := [axis for combination in _combinations(sweep, name)[:1] for axis in combination if axis not in own]:
        raise ValueError(
            f"{subject} has axes that arm {child} does not have: {', '.join(missing)}: add them to arms.{child}.axes, "
            f"or leave them out of arms.{name}.axes"
        )
    if _excluded(sweep, name, own, seed):
        raise ValueError(
            f"{subject} is excluded by `exclude` at {own | {SEED: seed}}: also exclude arm {child} there, or do not "
            f"exclude arm {name}"
        )
    return _cell(sweep, name, own, seed, extra)


def _has(sweep: Sweep, arm: str, axis: str) -> bool:
    chosen = sweep.arms[arm].axes
    return chosen is None or axis in chosen


def _combinations(sweep: Sweep, arm: str) -> list[dict[str, str]]:
    """Return all combinations of the values of the arm's axes, each as a mapping of axes to names of values.

    Zipped axes are combined only by position: the first value of one with the first value of the other, and so on.
    """
    groups = []
    for group in sweep.groups:
        names = {axis: list(values) for axis, values in group.items() if _has(sweep, arm, axis)}
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


def _last_wins(overrides: list[str]) -> tuple[str, ...]:
    """Return the overrides without those whose key is set again later, since Hydra refuses some repeated keys."""
    return tuple({override.partition("=")[0]: override for override in overrides}.values())
