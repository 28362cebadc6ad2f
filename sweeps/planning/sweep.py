"""Read sweep files, each of which describes a set of trials: Hydra composes a file, dataclasses check its values.

    overrides: [model=nemotron-nano, data=python]      # overrides of every trial, as for `fewbits train`
    seeds: [0, 1, 2]
    axes:
      recipe.threshold: [0.03, 0.045]              # each value is combined with each value of the other axes
    zipped:
      - {training.steps: [500, 1000], optimizer.lr: [1e-3, 5e-4]}   # these vary together
    arms:
      trunk: {overrides: [recipe=bf16], axes: []}  # without axes: one trial for all axis values
      mor: {overrides: [recipe=mor/block], parent: trunk, at: 0.8}  # starts after 0.8 of the parent's steps
    exclude:
      - {arm: mor, recipe.threshold: 0.03, seed: [1, 2]}

If the values of an axis are lists of overrides, they have names: `axes: {data: {small: [data=python], …}}`. Such a list
may contain `at=0.5`, which comes before an arm's `at`: then the axis chooses the checkpoint where a branch starts.
`values` holds numbers or lists of overrides, usually set by a scale, which other keys refer to as `${values.NAME}`.
`assumed` names settings that the paper does not state. If data are missing, `--dry-run` prints all settings and marks
the assumed ones. A folder `scale/` beside the file may hold files NAME.yaml: `scale=NAME` includes one of them, which
sets the sizes of the trials, and which may give single sweeps of the study other seeds (`seeds_of: {probes: [3, 4]}`)
or fewer arms (`arms_of: {probes: [probe-block]}`).
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
START = "at="  # begins an item of an axis that is no override: where branches start in their parent
ARM, SEED = "arm", "seed"  # keys that an exclusion may have besides axes


def start_of(text: str) -> float:
    """Return the value of `at=VALUE`; raise ValueError if it is no fraction below 1 and no whole step."""
    try:
        at = float(text.removeprefix(START))
    except ValueError:
        at = math.nan
    if not at > 0 or (at > 1 and at % 1):
        raise ValueError(
            f"{text.replace('=', ' ')}: a fraction of the parent's steps below 1, or a whole step, is expected"
        )
    return at


@dataclass(frozen=True)
class Arm:
    """An arm of a sweep file: its trials differ only in their seed and in values of axes."""

    overrides: tuple[str, ...] = ()
    axes: tuple[str, ...] | None = None  # the axes of the sweep that it has; None: all
    parent: str | None = None  # the arm from whose checkpoint it starts, with the same seed and values of axes
    scratch: bool = False  # it starts from scratch although the sweep has a trunk
    # Where it starts: below 1 a fraction of the parent's steps, else a step; None: the parent's end.
    at: float | None = None
    scales: tuple[str, ...] | None = None  # the scales at which it runs; None: all
    about: str = ""

    def __post_init__(self) -> None:
        if self.at is not None:
            start_of(f"{START}{self.at}")


@dataclass(frozen=True)
class Resources:
    """The resources of one trial."""

    cpus: float | None = None  # of each rank; None: as many as runtime.threads
    gpus: float | None = None  # of each rank; a trial on several GPUs has as many ranks. None: 1 on cuda, else 0
    ranks: int = 1  # processes
    memory: float = 0.0  # GiB of each rank; 0: not reserved
    hours: float = 0.0  # the time limit of an attempt; 0: none
    attempts: int = 3  # failed attempts in a row before a trial counts as failed; progress resets the count

    def __post_init__(self) -> None:
        for name, least in (("cpus", 0), ("gpus", 0), ("ranks", 1), ("memory", 0), ("hours", 0), ("attempts", 1)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"resources.{name} {value}: {least} or more is expected")


@dataclass(frozen=True)
class Sweep:
    """A sweep as its file describes it, before it is expanded to trials."""

    name: str
    study: str = ""  # its experiment in MLflow; the default for a user's sweep file is the file's name
    about: str = ""
    scale: str = "smoke"
    scales: tuple[str, ...] | None = None  # the scales at which it runs; None: all
    values: dict[str, Any] = field(default_factory=dict)  # for ${values.NAME} elsewhere in the file
    overrides: tuple[str, ...] = ()  # overrides of every trial
    # Overrides of every trial that set its size, by default those of the scale.
    size: tuple[str, ...] = ("scale=${scale}",)
    seeds: tuple[int, ...] = (0,)
    arms: dict[str, Arm] = field(default_factory=lambda: {"": Arm()})
    only: tuple[str, ...] = ()  # run these arms alone, with those that they start from; empty: all
    trunk: str | None = None  # the arm that is the parent of all arms that name none
    axes: dict[str, Any] = field(default_factory=dict)
    zipped: tuple[Any, ...] = ()
    exclude: tuple[Any, ...] = ()
    resources: Resources = Resources()
    assumed: tuple[str, ...] = ()  # settings that the paper does not state, for example optimizer.lr

    def __post_init__(self) -> None:
        for name in (self.name, self.study, self.scale):
            if name and not re.fullmatch(r"\w[\w. -]{0,79}", name):
                raise ValueError(
                    f"sweep {self.name!r}: {name!r} names files and runs: valid names have up to 80 letters, digits, "
                    "_ . - and spaces, and begin with a letter, a digit or _"
                )
        if not self.seeds:
            raise ValueError(f"sweep {self.name}: seeds is empty, so there is no trial")
        for seed in self.seeds:
            if not 0 <= seed < SEEDS or self.seeds.count(seed) > 1:
                raise ValueError(
                    f"sweep {self.name}: seeds {list(self.seeds)}: different integers from 0 to 2^63 - 1 are expected"
                )
        names = [name for group in self.groups for name in group]
        for name in names:
            if names.count(name) > 1 or name in (ARM, SEED):
                raise ValueError(
                    f"sweep {self.name}: axis {name}: an axis may occur only once, and arm and seed are no axes"
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
                    f"sweep {self.name}: arms.{name}.at {arm.at}: the arm has no parent, in which it could start; "
                    "set its parent, or remove at"
                )
            if arm.parent is not None:
                one_of(f"sweep {self.name}: arms.{name}.parent:", arm.parent, [a for a in self.arms if a != name])
        for name in self.arms:
            line = [name]
            while (above := self.arms[line[-1]].parent) is not None:
                if above in line:
                    raise ValueError(f"sweep {self.name}: arms {', '.join(line)} start from each other in a cycle")
                line.append(above)
        for exclusion in self.exclude:
            if not isinstance(exclusion, Mapping) or not exclusion:
                raise ValueError(f"sweep {self.name}: exclude {exclusion!r}: a mapping of axes to values is expected")
            for key in exclusion:
                one_of(f"sweep {self.name}: exclude:", key, (ARM, SEED, *names))
            for axis, value in ((axis, value) for axis, chosen in exclusion.items() for value in listed(chosen)):
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
        """The groups of axes that vary together, each axis with its values by name; a single axis is a group too."""
        groups = [{axis: _values(self.name, axis, values)} for axis, values in self.axes.items()]
        for zipped in self.zipped:
            if not isinstance(zipped, Mapping) or not zipped:
                raise ValueError(f"sweep {self.name}: zipped {zipped!r}: a mapping of axes to lists is expected")
            group = {str(axis): _values(self.name, axis, values) for axis, values in zipped.items()}
            if len({len(values) for values in group.values()}) > 1:
                sizes = ", ".join(f"{axis} has {len(values)}" for axis, values in group.items())
                raise ValueError(f"sweep {self.name}: zipped axes need equally many values, but {sizes}")
            groups.append(group)
        return groups

    def runs_at(self, arm: str) -> bool:
        """Tell whether the arm is part of the sweep at the sweep's scale."""
        return (not self.only or arm in self._chosen) and all(
            scales is None or self.scale in scales for scales in (self.scales, self.arms[arm].scales)
        )

    @property
    def _chosen(self) -> set[str]:
        """The arms of `only` that this sweep has, and those that they start from."""
        chosen: set[str] = set()
        for name in self.only:
            above: str | None = name if name in self.arms else None
            while above is not None:
                chosen.add(above)
                above = self.arms[above].parent
        return chosen


def listed(chosen: Any) -> Sequence[Any]:
    """Return the values that an entry of `exclude` names for an axis: those of its list, or its one value."""
    return chosen if isinstance(chosen, list | tuple) else [chosen]


def load_sweeps(overrides: Sequence[str]) -> tuple[list[Sweep], tuple[str, ...]]:
    """Return the sweeps that the overrides select, and the overrides that apply to every trial.

    `study=NAME [sweep=NAME]` or a sweep file selects sweeps; overrides of a sweep's own keys, such as `seeds=[0,1]`,
    are applied to them. Raise ValueError for invalid overrides or files.

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
                raise ValueError(f"{override!r} after {chosen[key]!r}: only one {key} can be named")
            chosen[key] = value
        elif name in _BASE:
            changes.append(override)
        elif name in _OF_TRIALS or is_search_path(override):
            extra.append(override)
        else:
            valid = nearest_first(name, list(dict.fromkeys((*_WHICH, *sorted(_BASE), *sorted(_OF_TRIALS)))))
            hint = _meant(override, folders(list(filter(is_search_path, overrides)))) or f"valid keys are {valid}"
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
            raise ValueError(f"{chosen['file']} and {', '.join(others)}: name a file or a study, not both")
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


def _meant(word: str, own: Folders) -> str:
    """Return a hint if the word is a study, a sweep file of the user's folders, or a file without its ending."""
    named = ((word in STUDIES, f"study={word}"), (own.file(SWEEPS, word), f"sweep={word}"))
    file = (Path(f"{word}.yaml").is_file(), f"{word}.yaml")
    return next((f"did you mean {argument}?" for is_there, argument in (*named, file) if is_there), "")


def _may_run(file: Path, changes: Sequence[str]) -> bool:
    """Tell whether the sweep may run at the scale that the overrides choose.

    Other files are not composed, so a scale need not have the values of sweeps that never run at it.
    """
    scale = [change.partition("=")[2] for change in changes if change.startswith("scale=")]
    scales = (yaml.safe_load(file.read_text("utf-8")) or {}).get("scales")
    return not scale or scales is None or scale[-1] in scales or not _has_scale(file, scale[-1])


def _has_scale(file: Path, scale: str) -> bool:
    return (file.parent / "scale" / f"{scale}.yaml").is_file()


def _own_file(name: str, own: Folders) -> Path:
    """Return the sweep file of this name in the user's config folders, for example conf/sweep/NAME.yaml."""
    if (file := own.file(SWEEPS, name)) is None:
        valid = nearest_first(name, names(SWEEPS, own)) or f"none: there is no file {CONF}/{SWEEPS}/{name}.yaml"
        raise ValueError(f"sweep={name}: name its study, as in study=mor, or a sweep file of your own: {valid}")
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
    """Return the sweep with `parent` set to the trunk in each arm that starts from it by default."""
    if sweep.trunk is None:
        return sweep
    one_of("trunk", sweep.trunk, sweep.arms)
    arms = {
        name: arm if name == sweep.trunk or arm.parent or arm.scratch else replace(arm, parent=sweep.trunk)
        for name, arm in sweep.arms.items()
    }
    return replace(sweep, arms=arms)


_OF_SINGLE_SWEEPS = {"seeds": "seeds_of", "only": "arms_of"}  # keys by which a scale sets another for single sweeps
_BASE = {**plain(dataclasses.asdict(Sweep(""))), "arms": {}, **{key: {} for key in _OF_SINGLE_SWEEPS.values()}}
del _BASE["name"]


def _values(sweep: str, axis: str, values: Any) -> dict[str, Any]:
    """Return the overrides of each value of an axis, by the value's name.

    If the values are a list, each item gives the override `axis=item`. If they are a mapping, each item is a named list
    of overrides.
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
        f"overrides, not {values!r}"
    )
