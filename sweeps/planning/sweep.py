"""Define the content of sweep files, each of which describes a set of trials.

    overrides: [model=nemotron-nano, data=python]      # overrides of every trial, as for `fewbits train`
    seeds: [0, 1, 2]
    axes:
      recipe.threshold: [0.03, 0.045]              # each value is combined with each value of the other axes
    zipped:
      - {training.steps: [500, 1000], optimizer.lr: [1e-3, 5e-4]}   # first value with first value, second with second
    arms:
      trunk: {overrides: [recipe=bf16], axes: []}  # `axes: []`: one trial for each seed, whatever the axis values
      mor: {overrides: [recipe=mor/block], parent: trunk, at: 0.8}  # branches from trunk after 80 % of trunk's steps
    exclude:                                       # combinations that are not trained
      - {arm: mor, recipe.threshold: 0.03, seed: [1, 2]}

If each value of an axis is a list of overrides, each list has a name: `axes: {data: {small: [data=python], …}}`. Such a
list may contain `at=0.5`. It replaces the arm's `at`, so that the axis chooses the step at which a branch starts.
The key `values` contains numbers or lists of overrides, usually set by a scale file; other keys use them as
`${values.NAME}`. The key `assumed` lists settings that the paper does not state. If this machine does not have the text
that the trials read, `--dry-run` prints all settings and marks the assumed ones. The folder `scale/` beside the sweep
file may contain files NAME.yaml. `scale=NAME` includes one of them. A scale file sets the sizes of the trials. It may
also give one sweep of the study other seeds (`seeds_of: {probes: [3, 4]}`, where `probes` is the sweep) or fewer arms
(`arms_of: {probes: [probe-block]}`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from fewbits.common.from_dict import one_of
from fewbits.experiments.composition import override_values, spelled
from fewbits.experiments.trial import SEEDS

START = "at="  # the items `at=STEP` in an axis value are no overrides: they set the step at which branches start
ARM, SEED = "arm", "seed"  # keys that an item of `exclude` may have besides the names of axes
Group = dict[str, dict[str, Sequence[str]]]  # axis → name of a value → the value's overrides


def start_of(text: str) -> float:
    """Return VALUE of the text `at=VALUE`, which sets where a branch starts in its parent.

    A value between 0 and 1 (both excluded) is a fraction of the parent's steps; a whole number of 1 or more is a step.
    Raise ValueError for any other value.
    """
    try:
        at = float(text.removeprefix(START))
    except ValueError:
        at = math.nan
    if not at > 0 or (at > 1 and at % 1):
        raise ValueError(
            f"{text.replace('=', ' ')}: expected a fraction of the parent's steps between 0 and 1, or a step, 1 or more"
        )
    return at


@dataclass(frozen=True)
class Arm:
    """An arm of a sweep file: its trials differ only in their seed and in values of axes."""

    overrides: tuple[str, ...] = ()
    axes: tuple[str, ...] | None = None  # the sweep's axes over which this arm varies; None: all
    parent: str | None = None  # the arm whose checkpoints this arm's trials start from, at equal seed and axis values
    scratch: bool = False  # True: this arm has no parent although the sweep has a trunk
    # Where the arm starts in its parent: a value below 1 is a fraction of the parent's steps, a value of 1 or more is
    # a step, and None is the parent's last step.
    at: float | None = None
    scales: tuple[str, ...] | None = None  # the scales at which this arm is trained; None: all
    about: str = ""

    def __post_init__(self) -> None:
        if self.at is not None:
            start_of(f"{START}{self.at}")


@dataclass(frozen=True)
class Resources:
    """The resources that each trial of a sweep gets, set in the sweep file under `resources`."""

    cpus: float | None = None  # CPU cores for each rank; None: the number runtime.threads
    gpus: float | None = None  # GPUs for each rank: 1, or a fraction; None: 1 if the device is cuda, else 0
    ranks: int = 1  # processes that train the trial together; a trial on several GPUs has one rank for each GPU
    # After this many failed attempts in a row the trial counts as failed. A failed attempt that wrote a later
    # checkpoint than the one from which it started sets the count back to 1.
    attempts: int = 3

    def __post_init__(self) -> None:
        for name, least in (("cpus", 0), ("gpus", 0), ("ranks", 1), ("attempts", 1)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"resources.{name} {value}: expected a number of {least} or more")


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep file, before it is expanded to trials; each field is a key of the file."""

    name: str  # the file's name without .yaml
    study: str = ""  # the study; also the name of the MLflow experiment; for a user's own sweep file, the file's name
    about: str = ""
    scale: str = "smoke"
    scales: tuple[str, ...] | None = None  # the scales at which the sweep is trained; None: all
    values: dict[str, Any] = field(default_factory=dict)  # for ${values.NAME} elsewhere in the file
    overrides: tuple[str, ...] = ()  # overrides of every trial
    # Overrides of every trial that set its size; the default is the config group `scale` with the sweep's scale.
    size: tuple[str, ...] = ("scale=${scale}",)
    seeds: tuple[int, ...] = (0,)
    arms: dict[str, Arm] = field(default_factory=lambda: {"": Arm()})  # by name
    only: tuple[str, ...] = ()  # train only these arms and the arms from which they start; empty: all arms
    trunk: str | None = None  # the arm that is the parent of all arms without a `parent` and without `scratch`
    axes: dict[str, Any] = field(default_factory=dict)  # axis to its values: a list, or a mapping as in the docstring
    zipped: tuple[dict[str, Any], ...] = ()  # mappings of axes to values; the axes of one mapping vary together
    exclude: tuple[dict[str, Any], ...] = ()  # mappings of `arm`, `seed` or an axis to the values that are left out
    resources: Resources = Resources()
    assumed: tuple[str, ...] = ()  # settings that the paper does not state, for example optimizer.lr

    def __post_init__(self) -> None:
        for name in (self.name, self.study, self.scale):
            if name and not re.fullmatch(r"(?![. -])[^\x00-\x1f/\\@:=$'\"]{1,80}", name):
                rule = "up to 80 characters, none of / \\ @ : = $ ' \", that do not begin with . - or a space"
                self._refuse(f"{name!r} is not valid as a name: {rule}")
        if not self.seeds or len({*self.seeds}) < len(self.seeds) or not all(0 <= s < SEEDS for s in self.seeds):
            self._refuse(f"seeds {[*self.seeds]}: one or more different integers from 0 to 2^63 - 1 are expected")
        axes = [axis for group in self.groups for axis in group]
        for axis in axes:
            if axes.count(axis) > 1 or axis in (ARM, SEED):
                self._refuse(f"axis {axis}: each axis is allowed only once, and the names arm and seed are not allowed")
        bundles = [texts for group in self.groups for values in group.values() for texts in values.values()]
        of_axes = (text for texts in bundles for text in texts)
        of_arms = (text for arm in self.arms.values() for text in arm.overrides)
        for text in (*self.overrides, *self.size, *of_arms, *of_axes):
            if text.lstrip("+~").partition("=")[0] == SEED:
                self._refuse(f"{text!r}: set seeds with the key seeds, as in seeds: [0, 1]")
        for name, arm in self.arms.items():
            self._check_arm(name, arm, axes)
        for exclusion in self.exclude:
            self._check_exclusion(exclusion, axes)

    def _refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"sweep {self.name}: {problem}")

    def _check_arm(self, name: str, arm: Arm, axes: Sequence[str]) -> None:
        where = f"sweep {self.name}: arms.{name}"
        for axis in arm.axes or ():
            one_of(f"{where}.axes:", axis, axes)
        if arm.parent is not None:
            one_of(f"{where}.parent:", arm.parent, [other for other in self.arms if other != name])
        elif arm.at is not None and (arm.scratch or self.trunk in (None, name)):
            self._refuse(f"arms.{name}.at {arm.at}: the arm has no parent; set `parent`, or remove `at`")
        line = [name]
        while (above := self.arms[line[-1]].parent) in self.arms:
            if above in line:
                self._refuse(f"the parents of arms {', '.join(line)} form a cycle; change one `parent`")
            line.append(above)

    def _check_exclusion(self, exclusion: Mapping[str, Any], axes: Sequence[str]) -> None:
        if not exclusion:
            self._refuse(f"exclude {exclusion}: a mapping of axes to values is expected")
        for key, value in ((key, value) for key, chosen in exclusion.items() for value in as_list(chosen)):
            where = f"sweep {self.name}: exclude: {key}"
            if isinstance(value, list | tuple | Mapping):
                raise ValueError(f"{where} {value!r}: a value or a list of values is expected")
            if isinstance(self.axes.get(key), list | tuple):
                one_of(where, spelled(value), map(spelled, self.axes[key]))
            elif key == ARM:
                one_of(where, value, self.arms)
            elif key == SEED and type(value) is not int:
                raise ValueError(f"{where} {value!r}: a seed is an integer")
            one_of(f"sweep {self.name}: exclude:", key, (ARM, SEED, *axes))

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of axes that vary together: each axis in `axes` alone, and each mapping in `zipped`."""
        groups = [{axis: self._values(axis, values) for axis, values in zipped.items()} for zipped in self.zipped]
        for group in groups:
            if len({len(values) for values in group.values()}) != 1:
                sizes = ", ".join(f"{axis} has {len(values)}" for axis, values in group.items()) or "there are none"
                self._refuse(f"axes that are zipped need the same number of values, but {sizes}")
        return [*({axis: self._values(axis, values)} for axis, values in self.axes.items()), *groups]

    def _values(self, axis: str, values: Any) -> dict[str, Sequence[str]]:
        """Return the overrides of each value of an axis, by the value's name.

        An item VALUE of a list has the name VALUE and the override `axis=VALUE`; a mapping has names and overrides.
        """
        named: dict[str, Sequence[str]] = {}
        if isinstance(values, Mapping):
            bundles = values.values()
            if all(isinstance(texts, list | tuple) and all(isinstance(t, str) for t in texts) for texts in bundles):
                named = {str(name): tuple(texts) for name, texts in values.items()}
        elif isinstance(values, list | tuple) and not any(isinstance(value, Mapping) for value in values):
            named = {spelled(value): (f"{axis}={spelled(value)}",) for value in values}
        if not named or len(named) != len(values):
            self._refuse(
                f"axis {axis}: a list of different values is expected, or a mapping of names to lists of overrides, "
                f"not {values!r}"
            )
        return named

    def runs_at(self, arm: str) -> bool:
        """Tell whether the arm is trained at the sweep's scale.

        It is trained if this scale is in the sweep's `scales` and in the arm's own `scales`, and if the sweep's `only`
        contains the arm or an arm that starts from it, directly or through others. A key that is not set excludes
        nothing. arm: its name.
        """
        chosen: set[str] = set()
        for name in self.only:
            above: str | None = name if name in self.arms else None
            while above is not None:
                chosen.add(above)
                above = self.arms[above].parent
        scales = (self.scales, self.arms[arm].scales)
        return (not self.only or arm in chosen) and all(each is None or self.scale in each for each in scales)


def as_list(chosen: Any) -> Sequence[Any]:
    """Return `chosen`, which an item of `exclude` has for a key, as a list: a single value becomes a list of one."""
    return chosen if isinstance(chosen, list | tuple) else [chosen]


# ------------------------------------------------------------------------------------------------ cells

# A sweep or a multirun is expanded to its cells. A cell is a place in the grid with the overrides of its trial. The
# cells follow from the sweep file alone; no data are read.
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
