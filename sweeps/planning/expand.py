"""Expand a sweep to its cells: each cell has the overrides of one trial. This is a pure function and needs no data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fewbits.experiments.composition import spelled
from fewbits.sweeps.planning.sweep import ARM, SEED, START, Sweep, listed, start_of


@dataclass(frozen=True)
class Cell:
    """A place in the sweep's grid (an arm, values of its axes and a seed), with the overrides of its trial."""

    sweep: str
    arm: str
    axes: tuple[tuple[str, str], ...]  # each axis of the arm, and its value as text of Hydra's grammar
    seed: int
    overrides: tuple[str, ...]  # the trial's overrides, with each key once
    parent: Cell | None = None
    at: float | None = None  # where in its parent the trial starts: `Arm.at`, or `at=` of an axis

    @property
    def place(self) -> dict[str, str]:
        """The arm, the axis values and the seed, which identify the cell in its sweep."""
        return ({ARM: self.arm} if self.arm else {}) | dict(self.axes) | {SEED: str(self.seed)}

    @property
    def title(self) -> str:
        """The cell's name in messages."""
        return ", ".join([f"sweep {self.sweep}", *(f"{key} {value}" for key, value in self.place.items())])


def spell(place: Mapping[str, str]) -> str:
    """Return a place as text, for example `arm=mor seed=0`."""
    return " ".join(f"{key}={value}" for key, value in place.items())


def expand(sweep: Sweep, extra: tuple[str, ...] = ()) -> list[Cell]:
    """Return the cells in the order of the arms, then of the axes, then of the seeds.

    extra: further overrides for every trial. Raise ValueError if one of them is an axis of the sweep.
    """
    for axis in (axis for group in sweep.groups for axis in group):
        if axis in [override.partition("=")[0] for override in extra]:
            raise ValueError(f"{axis} is an axis of sweep {sweep.name}: choose its values with axes={{{axis}:[…]}}")
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
    subject = f"sweep {sweep.name}: arm {child} starts from {name}, which"
    if not sweep.runs_at(name):
        raise ValueError(f"{subject} is not run at scale {sweep.scale}")
    own = {axis: value for axis, value in axes.items() if _has(sweep, name, axis)}
    if missing := [axis for combination in _combinations(sweep, name)[:1] for axis in combination if axis not in own]:
        raise ValueError(f"{subject} has axes that {child} does not have: {', '.join(missing)}")
    if _excluded(sweep, name, own, seed):
        raise ValueError(f"{subject} is excluded at {own | {SEED: seed}}")
    return _cell(sweep, name, own, seed, extra)


def _has(sweep: Sweep, arm: str, axis: str) -> bool:
    chosen = sweep.arms[arm].axes
    return chosen is None or axis in chosen


def _combinations(sweep: Sweep, arm: str) -> list[dict[str, str]]:
    """Return the combinations of values of the arm's axes. An arm may have only some of a group's zipped axes."""
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
            key in place and any(place[key] in (spelled(value), str(value)) for value in listed(chosen))
            for key, chosen in exclusion.items()
        )
        for exclusion in sweep.exclude
    )


def _last_wins(overrides: list[str]) -> tuple[str, ...]:
    """Return the last override of each key, since Hydra refuses some repeated keys."""
    return tuple({override.partition("=")[0]: override for override in overrides}.values())
