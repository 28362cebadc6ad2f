"""Read sweep files, each of which describes a set of trials: Hydra composes a file, dataclasses check its values.

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

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fewbits.common.from_dict import from_dict, one_of
from fewbits.experiments.composition import compose_file, nearest_first, spelled
from fewbits.experiments.config_files import CONF, SWEEPS, Folders, folders, is_search_path, names
from fewbits.experiments.storage.run_folder import plain
from fewbits.experiments.trial import SEEDS, Trial
from fewbits.sweeps.planning.studies import STUDIES

FOLDER = Path(__file__).parents[1] / "config"
_WHICH = ("study", "sweep", "file")
_OF_TRIALS = (*(f.name for f in dataclasses.fields(Trial) if f.name != "seed"), "runtime")
START = "at="  # the items `at=STEP` in an axis value are no overrides: they set the step at which branches start
ARM, SEED = "arm", "seed"  # keys that an item of `exclude` may have besides the names of axes


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
    memory: float = 0.0  # GiB of main memory that Ray reserves for each rank; 0: not reserved
    hours: float = 0.0  # the time limit of an attempt; 0: no limit
    # After this many failed attempts in a row the trial counts as failed. A failed attempt that wrote a later
    # checkpoint than the one from which it started sets the count back to 1.
    attempts: int = 3

    def __post_init__(self) -> None:
        for name, least in (("cpus", 0), ("gpus", 0), ("ranks", 1), ("memory", 0), ("hours", 0), ("attempts", 1)):
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
    zipped: tuple[Any, ...] = ()  # mappings of axes to their values; the axes of one mapping vary together
    exclude: tuple[Any, ...] = ()  # mappings of `arm`, `seed` or an axis to the values whose combination is left out
    resources: Resources = Resources()
    assumed: tuple[str, ...] = ()  # settings that the paper does not state, for example optimizer.lr

    def __post_init__(self) -> None:
        for name in (self.name, self.study, self.scale):
            if name and not re.fullmatch(r"\w[\w. -]{0,79}", name):
                raise ValueError(
                    f"sweep {self.name!r}: {name!r} is not valid as a name of files and runs: a name has 1 to 80 "
                    "letters, digits, _ . - and spaces, and begins with a letter, a digit or _"
                )
        if not self.seeds:
            raise ValueError(f"sweep {self.name}: the list seeds is empty, so the sweep has no trial; write seeds: [0]")
        for seed in self.seeds:
            if not 0 <= seed < SEEDS or self.seeds.count(seed) > 1:
                raise ValueError(
                    f"sweep {self.name}: seeds {list(self.seeds)}: different integers from 0 to 2^63 - 1 are expected"
                )
        names = [name for group in self.groups for name in group]
        for name in names:
            if names.count(name) > 1 or name in (ARM, SEED):
                raise ValueError(
                    f"sweep {self.name}: axis {name}: each axis may occur only once in axes and zipped, and arm and "
                    "seed are not allowed as names of axes"
                )
        of_arms = [override for arm in self.arms.values() for override in arm.overrides]
        of_axes = [
            override
            for group in self.groups
            for values in group.values()
            for bundle in values.values()
            for override in bundle
        ]
        for override in of_axes:
            if override.startswith(START):
                start_of(override)
        for override in (*self.overrides, *self.size, *of_arms, *of_axes):
            if override.lstrip("+~").partition("=")[0] == SEED:
                raise ValueError(f"sweep {self.name}: {override!r}: set seeds with the key seeds, as in seeds: [0, 1]")
        for name, arm in self.arms.items():
            for axis in arm.axes or ():
                one_of(f"sweep {self.name}: arms.{name}.axes:", axis, names)
            if arm.at is not None and arm.parent is None and (arm.scratch or self.trunk in (None, name)):
                raise ValueError(
                    f"sweep {self.name}: arms.{name}.at {arm.at}: `at` is a step of the arm's parent, but the arm has "
                    "no parent; set `parent`, or remove `at`"
                )
            if arm.parent is not None:
                one_of(f"sweep {self.name}: arms.{name}.parent:", arm.parent, [a for a in self.arms if a != name])
        for name in self.arms:
            line = [name]
            while (above := self.arms[line[-1]].parent) is not None:
                if above in line:
                    raise ValueError(
                        f"sweep {self.name}: the parents of arms {', '.join(line)} form a cycle; change one `parent`"
                    )
                line.append(above)
        for exclusion in self.exclude:
            if not isinstance(exclusion, Mapping) or not exclusion:
                raise ValueError(f"sweep {self.name}: exclude {exclusion!r}: a mapping of axes to values is expected")
            for key in exclusion:
                one_of(f"sweep {self.name}: exclude:", key, (ARM, SEED, *names))
            for axis, value in ((axis, value) for axis, chosen in exclusion.items() for value in as_list(chosen)):
                where = f"sweep {self.name}: exclude: {axis}"
                if isinstance(value, list | tuple | Mapping):
                    raise ValueError(f"{where} {value!r}: a value or a list of values is expected")
                if isinstance(self.axes.get(axis), list | tuple):
                    one_of(where, spelled(value), map(spelled, self.axes[axis]))
                if axis == ARM:
                    one_of(where, value, self.arms)
                if axis == SEED and type(value) is not int:
                    raise ValueError(f"{where} {value!r}: a seed is an integer")

    @property
    def groups(self) -> list[dict[str, dict[str, Any]]]:
        """The groups of axes that vary together, as mappings: axis → name of a value → the value's overrides.

        An axis in `axes` is a group of its own; each mapping in `zipped` is a group.
        """
        groups = [{axis: _values(self.name, axis, values)} for axis, values in self.axes.items()]
        for zipped in self.zipped:
            if not isinstance(zipped, Mapping) or not zipped:
                raise ValueError(f"sweep {self.name}: zipped {zipped!r}: a mapping of axes to lists is expected")
            group = {str(axis): _values(self.name, axis, values) for axis, values in zipped.items()}
            if len({len(values) for values in group.values()}) > 1:
                sizes = ", ".join(f"{axis} has {len(values)}" for axis, values in group.items())
                raise ValueError(f"sweep {self.name}: axes that are zipped need the same number of values, but {sizes}")
            groups.append(group)
        return groups

    def runs_at(self, arm: str) -> bool:
        """Tell whether the arm is trained at the sweep's scale.

        It is trained if this scale is in the sweep's `scales` and in the arm's own `scales`, and if the sweep's `only`
        contains the arm or an arm that starts from it, directly or through others. A key that is not set excludes
        nothing. arm: its name.
        """
        return (not self.only or arm in self._chosen) and all(
            scales is None or self.scale in scales for scales in (self.scales, self.arms[arm].scales)
        )

    @property
    def _chosen(self) -> set[str]:
        """The arms in `only` that this sweep has, and all arms from which they start, directly or through others."""
        chosen: set[str] = set()
        for name in self.only:
            above: str | None = name if name in self.arms else None
            while above is not None:
                chosen.add(above)
                above = self.arms[above].parent
        return chosen


def as_list(chosen: Any) -> Sequence[Any]:
    """Return `chosen` as a list: a single value becomes a list of one value.

    chosen: what an item of `exclude` has for one of its keys, a value or a list of values.
    """
    return chosen if isinstance(chosen, list | tuple) else [chosen]


def load_sweeps(overrides: Sequence[str]) -> tuple[list[Sweep], tuple[str, ...]]:
    """Return the sweeps that the overrides select, and the overrides that apply to every trial of these sweeps.

    `study=NAME [sweep=NAME]` or the path of a sweep file selects sweeps. Overrides of keys of sweep files, such as
    `seeds=[0,1]`, change the returned sweeps. All others, such as `training.steps=20`, are returned as the second
    result. Raise ValueError for invalid overrides or files.

    >>> load_sweeps(("study=mor", "scale=cpu", "seeds=[0,1]", "training.steps=20"))
    """
    chosen: dict[str, str] = {}
    changes, extra = [], []
    for override in overrides:
        key, equals, value = override.partition("=")
        name = key.lstrip("+~").partition(".")[0]
        if override.endswith((".yaml", ".yml")) and (not equals or Path(override).is_file()):
            key, value = "file", override
        if key in _WHICH:
            if key in chosen:
                raise ValueError(f"{override!r} after {chosen[key]!r}: name only one {key}")
            chosen[key] = value
        elif name in _BASE:
            changes.append(override)
        elif name in _OF_TRIALS or is_search_path(override):
            extra.append(override)
        else:
            valid = nearest_first(name, list(dict.fromkeys((*_WHICH, *sorted(_BASE), *sorted(_OF_TRIALS)))))
            hint = _suggestion(override, folders(list(filter(is_search_path, overrides)))) or f"valid keys are {valid}"
            expected = "KEY=VALUE" if "=" in override else "KEY=VALUE, or a sweep file NAME.yaml"
            raise ValueError(f"{override!r}: expected {expected}; {hint}")
    sweeps = _load_chosen(chosen, changes, folders(extra))
    return sweeps, tuple(extra)


def _load_chosen(chosen: dict[str, str], changes: Sequence[str], own: Folders) -> list[Sweep]:
    if "sweep" in chosen and "study" not in chosen and "file" not in chosen:
        chosen["file"] = str(_own_file(chosen.pop("sweep"), own))
    sweeps = _load_files(chosen, changes, own)
    arms = dict.fromkeys(arm for sweep in sweeps for arm in sweep.arms)
    for name in dict.fromkeys(name for sweep in sweeps for name in sweep.only):
        one_of("only", name, arms)
    return sweeps


def _load_files(chosen: dict[str, str], changes: Sequence[str], own: Folders) -> list[Sweep]:
    if "file" in chosen:
        if others := [f"{key}={chosen[key]}" for key in _WHICH if key in chosen and key != "file"]:
            raise ValueError(f"{chosen['file']} and {', '.join(others)}: name either a sweep file or a study, not both")
        file = Path(chosen["file"]).expanduser()
        if not file.is_file() and file == Path(file.name):
            file = own.file(SWEEPS, file.stem) or file
        if file.suffix != ".yaml" or not file.is_file():
            raise ValueError(f"no sweep file {file}: a file NAME.yaml is expected")
        return [_load(file, file.stem, changes)]
    valid = [name for name in STUDIES if (FOLDER / name).is_dir()]
    if "study" not in chosen:
        raise ValueError(f"name a sweep: study=NAME or a sweep file FILE.yaml; valid studies are {', '.join(valid)}")
    one_of("study", chosen["study"], valid)
    files = sorted((FOLDER / chosen["study"]).glob("*.yaml"))
    if "sweep" in chosen:
        one_of("sweep", chosen["sweep"], [file.stem for file in files])
        files = [file for file in files if file.stem == chosen["sweep"]]
    else:
        files = [file for file in files if _may_run(file, changes)]
    return [_load(file, chosen["study"], changes) for file in files]


def _suggestion(argument: str, user_folders: Folders) -> str:
    """Return a hint such as `did you mean study=mor?` for an argument that is not valid; empty if nothing fits.

    A hint is returned if the argument is the name of a study, the name of a sweep file in the user's config folders, or
    the path of a YAML file without its suffix `.yaml`.
    """
    named = ((argument in STUDIES, f"study={argument}"), (user_folders.file(SWEEPS, argument), f"sweep={argument}"))
    file = (Path(f"{argument}.yaml").is_file(), f"{argument}.yaml")
    return next((f"did you mean {valid}?" for is_there, valid in (*named, file) if is_there), "")


def _may_run(file: Path, changes: Sequence[str]) -> bool:
    """Tell from the key `scales` of a sweep file whether the sweep is trained at the scale that `changes` choose.

    Return True if `changes` choose no scale or an unknown one. A file for which the result is False is not composed
    with the scale's file. Therefore the scale's file may lack the numbers (its section `values`) that only this sweep
    uses. changes: overrides of keys of the sweep file, such as `scale=cpu`.
    """
    scale = [change.partition("=")[2] for change in changes if change.startswith("scale=")]
    scales = (yaml.safe_load(file.read_text("utf-8")) or {}).get("scales")
    return not scale or scales is None or scale[-1] in scales or not _has_scale(file, scale[-1])


def _has_scale(file: Path, scale: str) -> bool:
    return (file.parent / "scale" / f"{scale}.yaml").is_file()


def _own_file(name: str, own: Folders) -> Path:
    """Return the path of this sweep file in the user's config folders `own`, for example conf/sweep/NAME.yaml.

    Raise ValueError if no folder has the file.
    """
    if (file := own.file(SWEEPS, name)) is None:
        valid = nearest_first(name, names(SWEEPS, own)) or f"none: there is no file {CONF}/{SWEEPS}/{name}.yaml"
        raise ValueError(
            f"sweep={name}: also name its study, as in study=mor, or name a sweep file of your own: {valid}"
        )
    return file


def _load(file: Path, study: str, changes: Sequence[str]) -> Sweep:
    for change in changes:
        key, equals, value = change.lstrip("+~").partition("=")
        node, dot, axis = key.partition(".")
        if node == "axes" and dot and equals and "." in axis and axis.partition(".")[0] in _OF_TRIALS:
            raise ValueError(
                f"{change!r}: Hydra reads the dots in {axis} as nested keys: write axes={{{axis}:{value}}}"
            )
    data = compose_file(file, _BASE, changes, group="scale")
    data["study"], data["arms"] = data["study"] or study, data["arms"] or {"": {}}
    given = {change.lstrip("+~").partition("=")[0] for change in changes}
    for key, of_single_sweeps in _OF_SINGLE_SWEEPS.items():
        own = data.pop(of_single_sweeps).get(file.stem)
        if own is not None and key not in given:
            data[key] = own
    try:
        return _with_trunk(from_dict(Sweep, {"name": file.stem, **data}))
    except ValueError as error:
        raise ValueError(f"{' '.join([file.name, *changes])}: {error}") from None


def _with_trunk(sweep: Sweep) -> Sweep:
    """Return the sweep with the arm that its key `trunk` names as the parent of all other arms.

    Arms with a `parent` of their own or with `scratch: true` stay unchanged, as does a sweep without the key `trunk`.
    """
    if sweep.trunk is None:
        return sweep
    one_of("trunk", sweep.trunk, sweep.arms)
    arms = {
        name: arm if name == sweep.trunk or arm.parent or arm.scratch else replace(arm, parent=sweep.trunk)
        for name, arm in sweep.arms.items()
    }
    return replace(sweep, arms=arms)


# Keys of a sweep, and the keys of a scale file that set them for single sweeps: `seeds_of: {SWEEP: [1, 2]}`.
_OF_SINGLE_SWEEPS = {"seeds": "seeds_of", "only": "arms_of"}
_BASE = {**plain(dataclasses.asdict(Sweep(""))), "arms": {}, **{key: {} for key in _OF_SINGLE_SWEEPS.values()}}
del _BASE["name"]


def _values(sweep: str, axis: str, values: Any) -> dict[str, Any]:
    """Return the overrides of each value of an axis, by the value's name. sweep: the sweep's name, for errors.

    If `values` is a list, an item VALUE has the name VALUE and the override `axis=VALUE`. If `values` is a mapping, its
    keys are the names and each of its values is a list of overrides.
    """
    if isinstance(values, Mapping) and values:
        if all(isinstance(items, list | tuple) and all(isinstance(i, str) for i in items) for items in values.values()):
            bundles = {str(name): tuple(items) for name, items in values.items()}
            if len(bundles) == len(values):
                return bundles
    elif isinstance(values, list | tuple) and values and not any(isinstance(v, Mapping) for v in values):
        named = {spelled(value): (f"{axis}={spelled(value)}",) for value in values}
        if len(named) == len(values):
            return named
    raise ValueError(
        f"sweep {sweep}: axis {axis}: a list of different values is expected, or a mapping of names to lists of "
        f"overrides, but it is {values!r}"
    )
