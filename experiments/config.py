"""Turn config overrides into a trial: Hydra composes the config files, and dataclasses check the result.

The files are in `experiments/config/`; every model of the registry is a choice of the group `model` too. An override
chooses from a group by name (`recipe=mor/block`) or sets a field by its path (`training.steps=500`). Unknown names,
unknown keys and values of a wrong type raise ValueError with one line that lists the valid choices.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fewbits.common.from_dict import from_dict, one_of
from fewbits.experiments.composed_cache import digest_of_files, load_or_compose
from fewbits.experiments.composition import ERRORS, compose, nearest_first, parse_override, spelled
from fewbits.experiments.trial import Runtime, Trial
from fewbits.models.networks.presets import MODELS
from fewbits.models.recipe import GEMMS, SLOTS, Recipe

FOLDER = Path(__file__).parent / "config"
ROOT = "trial"
GROUPS = ("model", *sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir()))
KINDS = {float: "a number", int: "a whole number", str: "a string"}


def load_trial(overrides: Sequence[str] = ()) -> tuple[Trial, Runtime]:
    """Return the trial that the overrides describe, and its runtime settings.

    >>> trial, runtime = load_trial(["model=nemotron-nano", "recipe=mor/block", "seed=1"])
    """
    data = resolved(overrides)
    runtime = from_dict(Runtime, data.pop("runtime", {}), "runtime")
    if isinstance(data.get("recipe"), Mapping):
        data["recipe"] = _recipe(data["recipe"], overrides)
    return Trial.from_dict(data), runtime


def load_recipe(name: str, settings: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe with this name, with some of its settings or fields changed.

    >>> load_recipe("mor/block", {"threshold": 0.05})
    """
    return recipe_from_overrides(name, [f"{key}={spelled(value)}" for key, value in (settings or {}).items()])


def recipe_from_overrides(name: str, changes: Sequence[str]) -> Recipe:
    """Return the recipe with this name, with its settings changed by overrides as on a command line.

    >>> recipe_from_overrides("nvfp4", ["keep.last=2", "stochastic=[dgrad.dy]"])
    """
    overrides = [f"recipe={spelled(name)}", *(f"recipe.{change}" for change in changes)]
    return recipe_and_settings(overrides)[0]


def names(group: str) -> list[str]:
    """Return the names that a group offers, for example those of all recipes for `recipe`."""
    stored = MODELS if group == "model" else ()
    files = (FOLDER / group).rglob("*.yaml")
    return [*stored, *sorted(f.relative_to(FOLDER / group).with_suffix("").as_posix() for f in files)]


def resolved(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the composed config as plain values, with interpolations resolved.

    Composing takes tens of milliseconds, and a sweep has hundreds of trials. So each choice of groups is composed once,
    and the other overrides are then set on a copy as Hydra sets them. Trials that differ only in their seed share the
    copy too.
    """
    parsed = [_parsed(text) for text in overrides]
    if not all(override.sets or override.chooses for override in parsed):
        return _plain(_composed(tuple(overrides)), overrides)
    groups = tuple(override.text for override in parsed if override.chooses)
    values = tuple(override.text for override in parsed if override.sets)
    seeds = [override.value for override in parsed if override.key == "seed"]
    if not seeds or type(seeds[-1]) is not int or _reads_seed(groups) or any("${" in text for text in values):
        return copy.deepcopy(_with_values(groups, values))
    others = tuple(override.text for override in parsed if override.sets and override.key != "seed")
    return copy.deepcopy(_with_values(groups, others)) | {"seed": seeds[-1]}


@cache
def _reads_seed(groups: tuple[str, ...]) -> bool:
    """Tell whether an interpolation in the composed config may read the seed."""
    return re.search(r"\$\{[^}]*\bseed\b", str(OmegaConf.to_container(_composed(groups)))) is not None


@lru_cache(maxsize=256)
def _with_values(groups: tuple[str, ...], values: tuple[str, ...]) -> dict[str, Any]:
    config = copy.deepcopy(_composed(groups))
    try:
        for override in map(_parsed, values):
            OmegaConf.update(config, override.key, override.value, merge=True)
    except OmegaConfBaseException:
        config = _composed((*groups, *values))  # raises Hydra's error, which names the override
    return _plain(config, (*groups, *values))


@lru_cache(maxsize=256)
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    prepare()
    try:
        return load_or_compose(_composed_from(), overrides, lambda: compose(FOLDER, ROOT, overrides))
    except ERRORS as error:
        raise ValueError(in_one_line(error, overrides)) from error


@cache
def _composed_from() -> str:
    models = {name: dataclasses.asdict(model) for name, model in MODELS.items()}
    return digest_of_files(FOLDER, models, Recipe().to_dict())


def _plain(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except ERRORS as error:
        raise ValueError(in_one_line(error, overrides)) from error
    return cast(dict[str, Any], data)


def recipe_and_settings(overrides: Sequence[str]) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe that the overrides choose, and its settings: its file's keys that are not fields of Recipe."""
    data = resolved(overrides)["recipe"]
    return _recipe(data, overrides), _settings(data)


def _recipe(data: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """Return the recipe of a composed config. A ValueError names the setting whose value has a wrong type, if any."""
    settings = _settings(data)
    chosen = [override.value for override in map(_parsed, overrides) if override.key == "recipe" and override.chooses]
    if chosen and not any(override.startswith("recipe.name=") for override in overrides):
        data = {**data, "name": chosen[-1]}  # also for a file that includes another recipe, with its name
    try:
        return Recipe.from_dict({key: value for key, value in data.items() if key not in settings})
    except ValueError as error:
        raise ValueError(_about_setting(settings, overrides) or str(error)) from None


def _settings(data: Mapping[str, Any]) -> dict[str, Any]:
    fields = {f.name for f in dataclasses.fields(Recipe)}
    return {key: value for key, value in data.items() if key not in fields}


@cache
def prepare() -> None:
    """Register with Hydra the configs that are not in files, the models and the base recipe, and `${options:…}`."""
    store = ConfigStore.instance()
    for name, model in MODELS.items():
        store.store(name, dataclasses.asdict(model), group="model")
    store.store("base", Recipe().to_dict(), group="recipe_base")
    OmegaConf.register_new_resolver("options", _options, replace=True)


_OPTION_SETTINGS = ("stochastic", "rotated", "rht", "signs")


def _options(slot: str, *, _root_: DictConfig) -> str:
    """Resolve `${options:SLOT}`: return what the settings in `_OPTION_SETTINGS` append to the slot's quantizer."""
    stochastic, rotated, size, signs = (_root_.recipe.get(key) for key in _OPTION_SETTINGS)
    for name, slots, valid in (("stochastic", stochastic, SLOTS), ("rotated", rotated, GEMMS)):
        if isinstance(slots, str) or not isinstance(slots, Sequence):
            raise ValueError(f"recipe.{name} {slots!r}: a list is expected, with values of {', '.join(valid)}")
        for item in slots:
            one_of(f"recipe.{name}", item, valid)
    text = ":stochastic" if slot in stochastic else ""
    if slot.split(".")[0] in rotated and size:
        text += f":rht{size}" + (f":signs={signs}" if signs is not None else "")
    return text


# ------------------------------------------------------------------------------------------------ errors


_RESOLVER_PREFIX = "ValueError raised while resolving interpolation: "


def check_keys(overrides: Sequence[str]) -> None:
    """Raise ValueError for keys that no trial has, before a multirun starts; Hydra checks one trial after the other."""
    for text in overrides:
        try:
            override: Override = OverridesParser.create().parse_override(text)
            values = (
                [str(value) for value in override.sweep_iterator()]
                if override.is_sweep_override()
                else [override.value()]
            )
        except HydraException:
            raise ValueError(f"{text!r} is not KEY=VALUE or KEY=VALUE,VALUE in Hydra's grammar") from None
        key = override.key_or_group
        if key in GROUPS and override.package is None:
            for value in values:
                _check_choice(key, value)
        elif override.type != OverrideType.CHANGE or re.split(r"\W", key)[0] in (*GROUPS, "hydra"):
            continue
        elif (complaint := _about_key(key, [])) is not None:
            raise ValueError(complaint)


@dataclass(frozen=True)
class _Parsed:
    """An override KEY=VALUE that sets a value (`sets`), chooses from a group (`chooses`), or is left to Hydra."""

    text: str
    key: str
    value: Any
    sets: bool
    chooses: bool


@lru_cache(maxsize=4096)
def _parsed(text: str) -> _Parsed:
    """Parse an override; raise ValueError if it is not KEY=VALUE or names an unknown choice."""
    override = parse_override(text)
    key, value = override.key_or_group, override.value()
    chooses = key in GROUPS and override.package is None
    if chooses and not override.is_delete():
        _check_choice(key, value)
    if re.match(r"hydra\b", key):
        raise ValueError(f"unknown key {key!r}: Hydra's own settings have no effect on a trial")
    changes = override.type == OverrideType.CHANGE and override.package is None
    return _Parsed(text, key, value, changes and not chooses and "/" not in key, changes and chooses)


def _check_choice(group: str, value: object) -> None:
    if value not in names(group):
        raise ValueError(f"no {group} {value!r}: valid names are {nearest_first(str(value), names(group))}")


def in_one_line(error: Exception, overrides: Sequence[str]) -> str:
    """Return Hydra's error as one line, or our own message instead if it can name the valid choices."""
    text = " ".join(str(error).split()).removeprefix(_RESOLVER_PREFIX).partition(" full_key:")
    if str(error).startswith(_RESOLVER_PREFIX):  # `_options` names the key itself
        return text[0]
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key and re.search(rf"'{re.escape(key)}'|^ {re.escape(key)}\b", f"{text[0]}\n{text[2]}", re.MULTILINE):
            choices = [o for o in overrides if o != override and "." not in o.partition("=")[0]]
            return _about_key(key, choices) or f"{key}: {text[0]}"
    return text[0]


def _about_setting(settings: Mapping[str, Any], overrides: Sequence[str]) -> str | None:
    """Return a message that names the recipe setting whose value has a wrong type; None if no type is wrong."""
    own = resolved([override for override in overrides if not override.lstrip("+~").startswith("recipe.")])["recipe"]
    for key, value in settings.items():
        kind, actual = type(own.get(key)), type(value)
        if actual is not kind and kind in KINDS and (actual, kind) != (int, float):
            return f"recipe.{key} {value!r}: {KINDS[kind]} is expected, such as {own[key]}"
    return None


def _about_key(key: str, choices: Sequence[str]) -> str | None:
    """Return a message about the unknown part of a key, with the valid names; None if the whole key is known.

    choices: the overrides that choose from groups, since these decide which keys exist.
    """
    node: Any = OmegaConf.create(resolved(choices))
    done: list[str] = []
    parts = key.split(".")
    for part in parts:
        if not isinstance(node, DictConfig) or part not in node:
            break
        node = node[part]
        done.append(part)
    if len(done) == len(parts):
        return None
    known = ".".join(done) or "a trial"
    if not isinstance(node, DictConfig):
        return f"{known} is a value and has no {'.'.join(parts[len(done) :])!r}"
    valid = dict.fromkeys((*map(str, node), *(() if done else GROUPS)))
    return f"unknown key {key!r}: {known} has {nearest_first(parts[len(done)], list(valid))}"
