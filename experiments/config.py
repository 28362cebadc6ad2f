"""Turn config overrides into a trial: Hydra composes the config files, and dataclasses check the result.

The files are in `experiments/config/` and in the user's own folders (`config_files.py`). The models in `MODELS`
(models/networks/presets.py) are configs of the group `model`, too. An override chooses a group's config by its name
(`recipe=mor/block`) or by the path of a file (`recipe=./mine.yaml`), or it sets a field (`training.steps=500`).
Unknown names, unknown keys and values of a wrong type raise ValueError with one line that lists the valid choices.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fewbits.common.from_dict import from_dict, one_of
from fewbits.experiments.composed_cache import (
    digest_of_files,
    digest_of_texts,
    load_or_compose,
    resolve,
    to_config,
)
from fewbits.experiments.composition import ERRORS, compose, nearest_first, parse_override, spelled
from fewbits.experiments.config_files import (
    FOLDER,
    GROUPS,
    ROOT,
    Folders,
    check_choice,
    folders,
    is_path,
    is_search_path,
    name_of,
    register_file,
)
from fewbits.experiments.hydra_settings import explain_setting, is_hydra_setting
from fewbits.experiments.trial import Runtime, Trial
from fewbits.models.networks.presets import MODELS
from fewbits.models.recipe import GEMMS, SLOTS, Recipe

_FIELDS = tuple(f.name for f in dataclasses.fields(Recipe))
_MISSING = "???"  # OmegaConf's mark for a key whose value is missing
KINDS = {float: "a number", int: "a whole number", str: "a string"}  # names of types in error messages


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
    """Return a recipe by its name (from `fewbits recipes`) or the path of a YAML file.

    settings: new values by key, as in overrides `recipe.KEY=VALUE`; see `fewbits recipes NAME` for the keys.

    >>> load_recipe("mor/block", {"threshold": 0.05})
    >>> load_recipe("./mine.yaml")
    """
    return recipe_from_overrides(name, [f"{key}={spelled(value)}" for key, value in (settings or {}).items()])


def recipe_from_overrides(name: str, changes: Sequence[str]) -> Recipe:
    """Return the recipe with this name, changed by overrides that are written without their prefix `recipe.`.

    >>> recipe_from_overrides("nvfp4", ["keep.last=2", "stochastic=[dgrad.dy]"])
    """
    overrides = [f"recipe={spelled(name)}", *(f"recipe.{change}" for change in changes)]
    return recipe_and_settings(overrides)[0]


def resolved(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the composed config as nested plain values, with interpolations `${…}` resolved.

    Hydra needs tens of milliseconds to compose a config, and a sweep has hundreds of trials. So the results of two
    steps are cached. Hydra composes one config for each combination of overrides that choose a group's config, such as
    recipe=nvfp4. Then the overrides that set values are applied to a copy of this config; this is done once for all
    trials that differ only in values that no interpolation reads, such as their seed.
    """
    own = folders(overrides)
    parsed = _parsed_with(overrides, own)
    texts = tuple(override.text for override in parsed)
    if not all(override.sets or override.chooses for override in parsed):
        return _resolved(_composed(texts, own), overrides)
    groups = tuple(override.text for override in parsed if override.chooses)
    values = [override for override in parsed if override.sets]
    independent = _independent(values, groups, own)
    others = tuple(override.text for override in values if override.key not in independent)
    data = copy.deepcopy(_with_values(groups, others, own))
    for override in values:
        if override.key in independent:
            *parents, name = override.key.split(".")
            section = data
            for parent in parents:
                section = section[parent]
            section[name] = override.value
    return data


def _independent(values: Sequence[_Parsed], groups: tuple[str, ...], own: Folders) -> set[str]:
    """Return the keys of those overrides in `values` that can be applied after interpolations `${…}` are resolved.

    The resulting config is the same as if they were applied before. This holds if the override replaces a plain value
    by a plain value, no interpolation reads its key, and no other override sets a section that contains this key.
    values: the overrides that set values. groups: those that choose configs of groups. own: the user's config folders.
    """
    if any("${" in override.text for override in values):
        return set()
    config, read = _composed(groups, own), _read_by_interpolations(groups, own)
    keys = {override.key for override in values}
    keys -= {override.key for override in values if not _is_plain(override.value)}
    return {
        key
        for key in keys
        if _is_plain(_get(config, key))
        and read is not None
        and not read & set(key.split("."))
        and not any(key.startswith(f"{override.key}.") for override in values)
    }


def _is_plain(value: object) -> bool:
    """Tell whether a value is None, a number, a bool or a string that OmegaConf does not treat in a special way."""
    return value is None or isinstance(value, (int, float)) or (isinstance(value, str) and not _is_special(value))


def _is_special(text: str) -> bool:
    return "${" in text or text == _MISSING


def _get(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key in nested mappings; `_MISSING` if the key does not exist."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name, _MISSING) if isinstance(value, Mapping) else _MISSING
    return value


@cache
def _read_by_interpolations(groups: tuple[str, ...], own: Folders) -> set[str] | None:
    """Return which keys of a config its interpolations may read; None if they may read any key.

    Of each key, only the last name is in the set, because interpolations may be relative: `block` for `${.block}`.
    groups: the config's overrides, which choose configs of groups. own: the user's config folders.
    """
    text = str(_composed(groups, own))
    inside = re.findall(r"\$\{([^{}]*)\}", text)
    if len(inside) < text.count("${") or any(":" in key and not key.startswith("options:") for key in inside):
        return None  # nested interpolations, or resolvers other than `_options`
    return {key.rpartition(".")[2] for key in inside} | set(_OPTION_SETTINGS)


@lru_cache(maxsize=256)
def _with_values(groups: tuple[str, ...], values: tuple[str, ...], own: Folders) -> dict[str, Any]:
    if not values:
        return _resolved(_composed(groups, own), groups)
    config = to_config(_composed(groups, own))
    try:
        for override in _parsed_with(values, own):
            OmegaConf.update(config, override.key, override.value, merge=True)
    except OmegaConfBaseException:
        config = to_config(_composed((*groups, *values), own))  # raises Hydra's error, which names the override
    return _resolved(config, (*groups, *values))


@lru_cache(maxsize=256)
def _composed(overrides: tuple[str, ...], own: Folders) -> dict[str, Any]:
    """Return the config that Hydra composes, as nested plain values in which interpolations are not resolved.

    own: the user's config folders. Raise ValueError, with a message in one line, for Hydra's errors.
    """
    prepare()
    digest = digest_of_texts({}, _composed_from(), *own.digests) if own.paths else _composed_from()
    try:
        return load_or_compose(digest, overrides, lambda: compose(FOLDER, ROOT, [*own.overrides, *overrides]))
    except ERRORS as error:
        raise ValueError(in_one_line(error, [*own.overrides, *overrides])) from error


@cache
def _composed_from() -> str:
    models = {name: dataclasses.asdict(model) for name, model in MODELS.items()}
    return digest_of_files(FOLDER, models, Recipe().to_dict())


def _resolved(config: DictConfig | Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a config with resolved interpolations; raise ValueError if one has no value.

    overrides: those of the config, for the message of the error.
    """
    try:
        return resolve(config)
    except ERRORS as error:
        raise ValueError(in_one_line(error, overrides)) from error


def recipe_and_settings(overrides: Sequence[str]) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe that the overrides choose, and its settings by key.

    A recipe's settings are the keys in its file that are not fields of the class Recipe.
    """
    data = resolved(overrides)["recipe"]
    return _recipe(data, overrides), _settings(data)


def _recipe(data: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """Return the recipe that the section `recipe` of a composed config describes.

    data: this section, with the recipe's fields and settings. overrides: those with which the config was composed; if
        they choose a recipe and do not set `recipe.name`, the returned recipe has the name of the chosen one.
    Raise ValueError if a field is invalid; if the cause is a setting with a value of a wrong type, the message names
    this setting. Also raise ValueError for a setting whose name is nearly that of a field, because it is misspelt.
    """
    settings = _settings(data)
    for key in settings:
        # Only words are compared: a setting such as `dgrad_dy` is like a field, but no misspelling.
        if key.isalpha() and (near := difflib.get_close_matches(key, _FIELDS, 1, cutoff=0.75)):
            raise ValueError(
                f"unknown key recipe.{key}: did you mean {near[0]}? Your own settings need names less similar to the "
                f"recipe's keys, {', '.join(_FIELDS)}"
            )
    parsed = _parsed_with(overrides, folders(overrides))
    chosen = [override.value for override in parsed if override.key == "recipe" and override.chooses]
    if chosen and not any(override.startswith("recipe.name=") for override in overrides):
        data = {**data, "name": chosen[-1]}  # a file that includes another recipe's file would have that recipe's name
    try:
        return Recipe.from_dict({key: value for key, value in data.items() if key not in settings})
    except ValueError as error:
        raise ValueError(_about_setting(settings, overrides) or str(error)) from None


def _settings(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in _FIELDS}


@cache
def prepare() -> None:
    """Register with Hydra what config files use but do not define: the models, a base recipe, and `${options:…}`.

    The base recipe has the default values of the class Recipe.
    """
    store = ConfigStore.instance()
    for name, model in MODELS.items():
        store.store(name, dataclasses.asdict(model), group="model")
    store.store("base", Recipe().to_dict(), group="recipe_base")
    OmegaConf.register_new_resolver("options", _options, replace=True)


_OPTION_SETTINGS = ("stochastic", "rotated", "rht", "signs")


def _options(slot: str, *, _root_: DictConfig) -> str:
    """Resolve `${options:SLOT}` in a recipe's file: return the text to append to the slot's quantizer.

    The recipe's settings in `_OPTION_SETTINGS` determine the text, for example `:stochastic:rht16`.
    """
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


@dataclass(frozen=True)
class _Parsed:
    """An override KEY=VALUE. It sets a value (`sets`) or chooses a group's config (`chooses`).

    If both are false, only Hydra can apply the override, for example +KEY=VALUE.
    """

    text: str
    key: str
    value: Any
    sets: bool
    chooses: bool


def _parsed_with(overrides: Sequence[str], own: Folders) -> list[_Parsed]:
    """Parse the overrides except `hydra.searchpath=…`; replace paths of config files by the names registered for them.

    own: the user's config folders. Raise ValueError for an unknown choice, and for text that is not an override.
    """
    parsed = [_parsed(text) for text in overrides if not is_search_path(text)]
    for number, override in enumerate(parsed):
        if override.chooses:
            check_choice(override.key, override.value, own)
            if is_path(override.value):
                text = f"{override.key}={register_file(override.key, override.value)}"
                parsed[number] = dataclasses.replace(override, text=text, value=name_of(override.value))
    return parsed


@lru_cache(maxsize=4096)
def _parsed(text: str) -> _Parsed:
    """Parse an override; raise ValueError if it is not KEY=VALUE."""
    override = parse_override(text)
    key, value = override.key_or_group, override.value()
    if key == "branch.parent" and isinstance(value, (int, float)):  # a run's hash such as 12345678 or 12e45678
        value = text.partition("=")[2].strip()
        text = f"{key}={spelled(value)}"
    if is_hydra_setting(key):
        raise ValueError(explain_setting(key))
    in_group = key in GROUPS and override.package is None
    changes = override.type == OverrideType.CHANGE and override.package is None
    return _Parsed(text, key, value, changes and not in_group and "/" not in key, changes and in_group)


def in_one_line(error: Exception, overrides: Sequence[str]) -> str:
    """Return Hydra's error as one line; if it concerns an unknown key in one of the overrides, list the valid keys."""
    text = " ".join(str(error).split()).removeprefix(_RESOLVER_PREFIX).partition(" full_key:")
    if str(error).startswith(_RESOLVER_PREFIX):  # `_options` names the key itself
        return text[0]
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key and re.search(rf"'{re.escape(key)}'|^ {re.escape(key)}\b", f"{text[0]}\n{text[2]}", re.MULTILINE):
            choices = [o for o in overrides if o != override and (is_search_path(o) or "." not in o.partition("=")[0])]
            return about_key(key, choices) or f"{key}: {text[0]}"
    return text[0]


def _about_setting(settings: Mapping[str, Any], overrides: Sequence[str]) -> str | None:
    """Return a message about the first recipe setting whose value has a wrong type; None if there is none.

    settings: the settings after the overrides. If the recipe's file sets one of them to a float, an int or a string,
        its new value must have the same type, but an int is accepted for a float. Other settings are not checked.
    """
    own = resolved([override for override in overrides if not override.lstrip("+~").startswith("recipe.")])["recipe"]
    for key, value in settings.items():
        kind, actual = type(own.get(key)), type(value)
        if actual is not kind and kind in KINDS and (actual, kind) != (int, float):
            return f"recipe.{key} {value!r}: {KINDS[kind]} is expected, such as {own[key]}"
    return None


def about_key(key: str, choices: Sequence[str]) -> str | None:
    """Return a message about the unknown part of a dotted key, with the valid names; None if the whole key is known.

    choices: the overrides that choose configs of groups, which determine the keys that exist.
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
        return f"{known} is a single value and has no key {'.'.join(parts[len(done) :])!r}"
    valid = dict.fromkeys((*map(str, node), *(() if done else GROUPS)))
    return f"unknown key {key!r}: {known} has the keys {nearest_first(parts[len(done)], list(valid))}"
