"""A sweep: trials described together, as a file says it. Hydra composes the file, these frozen values check it.

    words: [model=nemotron-nano, data=python]      # of every trial, as for `fewbits train`
    seeds: [0, 1, 2]
    axes:
      recipe.threshold: [0.03, 0.045]              # each value with each of the other axes'
    zipped:
      - {training.steps: [500, 1000], optimizer.lr: [1e-3, 5e-4]}   # these go together
    arms:
      trunk: {words: [recipe=bf16], axes: []}      # one arm may leave axes out: a baseline that all of them share
      mor: {words: [recipe=mor/block], parent: trunk, at: 0.8}      # starts at that part of the parent's steps
    exclude:
      - {arm: mor, recipe.threshold: 0.03, seed: 2}

An axis whose values are bundles of words has names for them: `axes: {data: {small: [data=python], …}}`.
`values` holds what other keys refer to as `${values.NAME}`, a number in a word or a list of words: a scale's, say.
`assumed` names settings that a paper does not state, for `--dry-run` to mark where its own data are not there.
Beside the file there may be a folder `scale/`, from which `scale=NAME` chooses how big everything is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fewbits.common.from_dict import from_dict, one_of
from fewbits.experiments.config import compose_file, nearest_first, spelled
from fewbits.experiments.runs.run_folder import plain
from fewbits.experiments.trial import SEEDS, Trial
from fewbits.sweeps.planning.studies import STUDIES

FOLDER = Path(__file__).parent / "config"
_WHICH = ("study", "sweep", "file")
_OF_TRIALS = (*(f.name for f in dataclasses.fields(Trial) if f.name != "seed"), "runtime")
ARM, SEED = "arm", "seed"  # what an exclusion may name beside axes


@dataclass(frozen=True)
class Arm:
    """One of the things compared."""

    words: tuple[str, ...] = ()
    axes: tuple[str, ...] | None = None  # that it has; None: all of the sweep's
    parent: str | None = None  # the arm from whose checkpoint it starts, with the same seed and values of axes
    scratch: bool = False  # it starts from nothing although the sweep has a trunk
    at: float | None = None  # which: below 1 a part of the parent's steps, else a step; None: its end
    scales: tuple[str, ...] | None = None  # at which it is run; None: all
    about: str = ""

    def __post_init__(self) -> None:
        if self.at is not None and (not self.at > 0 or (self.at > 1 and self.at % 1)):
            raise ValueError(f"at {self.at}: a part below 1 of the parent's steps or a whole step is expected")


@dataclass(frozen=True)
class Resources:
    """What one trial takes."""

    cpus: float | None = None  # of each rank; None: as many as runtime.threads
    gpus: float | None = None  # of each rank; on several GPUs as many ranks. None: 1 on cuda, else 0
    ranks: int = 1  # processes
    memory: float = 0.0  # GiB of each rank; 0: not reserved
    hours: float = 0.0  # after which an attempt is ended; 0: never
    attempts: int = 3  # without a step forward, before a trial counts as failed

    def __post_init__(self) -> None:
        for name, least in (("cpus", 0), ("gpus", 0), ("ranks", 1), ("memory", 0), ("hours", 0), ("attempts", 1)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"resources.{name} {value}: {least} or more is expected")


@dataclass(frozen=True)
class Sweep:
    name: str
    study: str = ""  # the experiment in MLflow that it belongs to; a sweep of your own may be its own study
    about: str = ""
    scale: str = "smoke"
    scales: tuple[str, ...] | None = None  # at which it is run; None: all
    values: dict[str, Any] = field(default_factory=dict)  # for ${values.NAME} elsewhere in the file
    words: tuple[str, ...] = ()
    size: tuple[str, ...] = ("scale=${scale}",)  # further words, the scale's
    seeds: tuple[int, ...] = (0,)
    arms: dict[str, Arm] = field(default_factory=lambda: {"": Arm()})
    trunk: str | None = None  # the arm that is the parent of all that name none
    axes: dict[str, Any] = field(default_factory=dict)
    zipped: tuple[Any, ...] = ()
    exclude: tuple[Any, ...] = ()
    resources: Resources = Resources()
    assumed: tuple[str, ...] = ()  # settings of its trials that the paper does not state: optimizer.lr, say

    def __post_init__(self) -> None:
        for called in (self.name, self.study, self.scale):
            if called and not re.fullmatch(r"\w[\w. -]{0,79}", called):
                raise ValueError(
                    f"sweep {self.name!r}: {called!r} names files and runs: valid are 80 of letters, digits, _ . - "
                    "and spaces, of which the first is a letter, a digit or _"
                )
        if not self.seeds:
            raise ValueError(f"sweep {self.name}: seeds is empty, so that there is no trial")
        for seed in self.seeds:
            if not 0 <= seed < SEEDS or self.seeds.count(seed) > 1:
                raise ValueError(f"sweep {self.name}: seeds {list(self.seeds)}: different integers from 0 to 2^63 - 1")
        names = [name for group in self.groups for name in group]
        for name in names:
            if names.count(name) > 1 or name in (ARM, SEED):
                raise ValueError(f"sweep {self.name}: axis {name} is given twice (arms and seeds are not axes)")
        of_arms = [word for arm in self.arms.values() for word in arm.words]
        of_axes = [
            word for group in self.groups for values in group.values() for words in values.values() for word in words
        ]
        for word in (*self.words, *self.size, *of_arms, *of_axes):
            if word.lstrip("+~").partition("=")[0] == SEED:
                raise ValueError(f"sweep {self.name}: {word!r}: seeds have a key of their own, seeds: [0, 1]")
        for name, arm in self.arms.items():
            for axis in arm.axes or ():
                _one_of(f"sweep {self.name}: arms.{name}.axes:", axis, names)
            if arm.at is not None and arm.parent is None and (arm.scratch or self.trunk in (None, name)):
                raise ValueError(f"sweep {self.name}: arms.{name}.at {arm.at}: of an arm that has no parent")
            if arm.parent is not None:
                _one_of(f"sweep {self.name}: arms.{name}.parent:", arm.parent, [a for a in self.arms if a != name])
        for name in self.arms:
            line = [name]
            while (above := self.arms[line[-1]].parent) is not None:
                if above in line:
                    raise ValueError(f"sweep {self.name}: arms {', '.join(line)} start from each other, in a circle")
                line.append(above)
        for exclusion in self.exclude:
            if not isinstance(exclusion, Mapping) or not exclusion:
                raise ValueError(f"sweep {self.name}: exclude {exclusion!r}: a mapping of axes to values is expected")
            for key in exclusion:
                one_of(f"sweep {self.name}: exclude:", key, (ARM, SEED, *names))
            if nested := [value for value in exclusion.values() if isinstance(value, list | tuple | Mapping)]:
                raise ValueError(f"sweep {self.name}: exclude {exclusion!r}: one value is expected, not {nested[0]!r}")
            for axis, value in exclusion.items():
                if isinstance(self.axes.get(axis), list | tuple):
                    one_of(f"sweep {self.name}: exclude: {axis}", spelled(value), map(spelled, self.axes[axis]))
            if ARM in exclusion:
                one_of(f"sweep {self.name}: exclude: arm", exclusion[ARM], self.arms)

    @property
    def groups(self) -> list[dict[str, dict[str, Any]]]:
        """Axes that vary together, each with its values by name; one axis alone is a group too."""
        found = [{axis: _values(self.name, axis, values)} for axis, values in self.axes.items()]
        for zipped in self.zipped:
            if not isinstance(zipped, Mapping) or not zipped:
                raise ValueError(f"sweep {self.name}: zipped {zipped!r}: a mapping of axes to lists is expected")
            group = {str(axis): _values(self.name, axis, values) for axis, values in zipped.items()}
            if len({len(values) for values in group.values()}) > 1:
                sizes = ", ".join(f"{axis} has {len(values)}" for axis, values in group.items())
                raise ValueError(f"sweep {self.name}: zipped axes are of one length, but {sizes} values")
            found.append(group)
        return found

    def runs_at(self, arm: str) -> bool:
        """Whether the arm is part of the sweep at this scale."""
        return all(scales is None or self.scale in scales for scales in (self.scales, self.arms[arm].scales))


def load_sweeps(words: Sequence[str]) -> tuple[list[Sweep], tuple[str, ...]]:
    """The sweeps that the words name, `study=NAME [sweep=NAME]` or a file of one's own, with changes to their keys;
    and words that are for every trial, as for `fewbits train`.

    >>> load_sweeps(("study=mor", "scale=cpu", "seeds=[0,1]", "training.steps=20"))
    """
    chosen: dict[str, str] = {}
    changes, extra = [], []
    for word in words:
        key, equals, value = word.partition("=")
        name = key.lstrip("+~").partition(".")[0]
        if word.endswith((".yaml", ".yml")) and (not equals or Path(word).is_file()):
            key, value = "file", word
        if key in _WHICH:
            if key in chosen:
                raise ValueError(f"{word!r} after {chosen[key]!r}: one {key} at a time")
            chosen[key] = value
        elif name in _BASE:
            changes.append(word)
        elif name in _OF_TRIALS:
            extra.append(word)
        else:
            valid = nearest_first(name, list(dict.fromkeys((*_WHICH, *_BASE, *_OF_TRIALS))))
            raise ValueError(f"{word!r} is neither of a sweep nor of its trials: valid keys are {valid}")
    sweeps = _chosen(chosen, changes)
    return sweeps, tuple(extra)


def _chosen(chosen: Mapping[str, str], changes: Sequence[str]) -> list[Sweep]:
    if "file" in chosen:
        if others := [f"{key}={chosen[key]}" for key in _WHICH if key in chosen and key != "file"]:
            raise ValueError(f"{chosen['file']} and {', '.join(others)}: a file or a study, not both")
        file = Path(chosen["file"]).expanduser()
        if file.suffix != ".yaml" or not file.is_file():
            raise ValueError(f"no sweep file {file}: a file NAME.yaml is expected")
        return [_load(file, file.stem, changes)]
    valid = [name for name in STUDIES if (FOLDER / name).is_dir()]
    if "study" not in chosen:
        raise ValueError(f"which sweep? study=NAME, valid are {', '.join(valid)}; or a file of your own, NAME.yaml")
    one_of("study", chosen["study"], valid)
    files = sorted((FOLDER / chosen["study"]).glob("*.yaml"))
    if "sweep" in chosen:
        one_of("sweep", chosen["sweep"], [file.stem for file in files])
        files = [file for file in files if file.stem == chosen["sweep"]]
    return [_load(file, chosen["study"], changes) for file in files]


def _load(file: Path, study: str, changes: Sequence[str]) -> Sweep:
    for word in changes:
        key, equals, value = word.lstrip("+~").partition("=")
        node, dot, axis = key.partition(".")
        if node == "axes" and dot and equals and "." in axis and axis.partition(".")[0] in _OF_TRIALS:
            raise ValueError(f"{word!r}: Hydra takes the dots of {axis} for levels: write axes={{{axis}:{value}}}")
    data = compose_file(file, _BASE, changes, group="scale")
    data["study"], data["arms"] = data["study"] or study, data["arms"] or {"": {}}
    try:
        return _with_trunk(from_dict(Sweep, {"name": file.stem, **data}))
    except ValueError as error:
        raise ValueError(f"{' '.join([file.name, *changes])}: {error}") from None


def _with_trunk(sweep: Sweep) -> Sweep:
    """With every arm's parent said."""
    if sweep.trunk is None:
        return sweep
    one_of("trunk", sweep.trunk, sweep.arms)
    arms = {
        name: arm if name == sweep.trunk or arm.parent or arm.scratch else replace(arm, parent=sweep.trunk)
        for name, arm in sweep.arms.items()
    }
    return replace(sweep, arms=arms)


_BASE = {**plain(dataclasses.asdict(Sweep(""))), "arms": {}}
del _BASE["name"]


def _one_of(what: str, value: object, valid: Sequence[object]) -> None:
    if not valid:
        raise ValueError(f"{what} {value!r}: there are none")
    one_of(what, value, valid)


def _values(sweep: str, axis: str, values: Any) -> dict[str, Any]:
    """By name: for a list, what is said of an axis is `axis=value`; for a mapping, the words that belong to a name."""
    if isinstance(values, Mapping) and values:
        if all(isinstance(words, list | tuple) and all(isinstance(w, str) for w in words) for words in values.values()):
            bundles = {str(name): tuple(words) for name, words in values.items()}
            if len(bundles) == len(values):
                return bundles
    elif isinstance(values, list | tuple) and values and not any(isinstance(v, Mapping) for v in values):
        named = {spelled(value): (f"{axis}={spelled(value)}",) for value in values}
        if len(named) == len(values):
            return named
    raise ValueError(
        f"sweep {sweep}: axis {axis}: a list of different values is expected, or a mapping of names to lists of words, "
        f"not {values!r}"
    )
