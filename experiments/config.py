"""Turn config overrides into a trial: Hydra composes the config tree, dataclasses check it.

The tree is `experiments/config/`, plus a node for every model of the registry. Groups are chosen by name
(`recipe=mor/block`), fields set by path (`training.steps=500`). Unknown names, unknown keys and values of a wrong type
raise ValueError with one line that lists the valid choices.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fewbits.common.from_dict import from_dict, one_of
from fewbits.experiments.composition import ConfigFolder
from fewbits.experiments.trial import Runtime, Trial
from fewbits.models.networks.presets import MODELS
from fewbits.models.recipe import GEMMS, SLOTS, Recipe

FOLDER = Path(__file__).parent / "config"
ROOT = "trial"
GROUPS = ("model", *sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir()))
_BASE_OF_FILES, _ROOT_OF_FILES = "fewbits_defaults", "fewbits_root"  # in Hydra's store, for `compose_file`
KINDS = {float: "a number", int: "a whole number", str: "a text"}


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
    """Return a recipe of the tree by name, with some of its settings or fields changed.

    >>> load_recipe("mor/block", {"threshold": 0.05})
    """
    return recipe_from_overrides(name, [f"{key}={spelled(value)}" for key, value in (settings or {}).items()])


def recipe_from_overrides(name: str, changes: Sequence[str]) -> Recipe:
    """Return a recipe of the tree by name, with its settings changed by overrides as on a command line.

    >>> recipe_from_overrides("nvfp4", ["keep.last=2", "stochastic=[dgrad.dy]"])
    """
    overrides = [f"recipe={spelled(name)}", *(f"recipe.{change}" for change in changes)]
    return _recipe(resolved(overrides)["recipe"], overrides)


def compose_file(file: Path, base: Mapping[str, Any], overrides: Sequence[str], group: str) -> dict[str, Any]:
    """Return the values of a YAML file over default values, with overrides applied, as plain resolved data.

    group=NAME includes NAME.yaml from the folder called `group` beside the file, if that folder exists.
    """
    folder, values, top = file.parent / group, list(overrides), _top_level(file, base)
    defaults: list[Any] = [_BASE_OF_FILES, file.stem]
    choice: dict[str, Any] = {}
    if folder.is_dir():
        chosen = [value.partition("=")[2] for value in values if value.startswith(f"{group}=")]
        choice[group] = chosen[-1] if chosen else top.get(group, base[group])
        one_of(group, choice[group], sorted(path.stem for path in folder.glob("*.yaml")))
        defaults.append({f"{group}@_global_": choice[group]})
        values = [value for value in values if not value.startswith(f"{group}=")]
    store = ConfigStore.instance()
    store.store(_BASE_OF_FILES, dict(base))
    store.store(_ROOT_OF_FILES, {"defaults": [*defaults, "_self_"]})
    for text in values:
        key = str(_override(text).key_or_group).partition(".")[0]
        if key not in base:
            raise ValueError(f"unknown key {key!r}: valid are {nearest_first(key, list(base))}")
    try:
        config = ConfigFolder(file.parent.resolve()).compose(_ROOT_OF_FILES, values)
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{file.name}: {' '.join(str(error).split())}") from error
    return cast(dict[str, Any], data) | choice


def _top_level(file: Path, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's top-level keys, checked here because Hydra's error names neither key nor file."""
    try:
        data = yaml.safe_load(file.read_text())
    except YAMLError as error:
        raise ValueError(f"{file.name}: {' '.join(str(error).split())}") from None
    if not isinstance(data or {}, dict):
        raise ValueError(f"{file.name}: a mapping is expected, with keys of {', '.join(base)}")
    for key, value in (data or {}).items():
        for kind, kind_name in ((dict, "a mapping"), (list, "a list")):
            if isinstance(base.get(key), kind) and isinstance(value, (dict, list)) and not isinstance(value, kind):
                raise ValueError(f"{file.name}: {key}: {kind_name} is expected, not {value!r}")
    return data or {}


def names(group: str) -> list[str]:
    """Return the names that a group offers, for example of `recipe`."""
    stored = MODELS if group == "model" else ()
    files = (FOLDER / group).rglob("*.yaml")
    return [*stored, *sorted(f.relative_to(FOLDER / group).with_suffix("").as_posix() for f in files)]


def resolved(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the composed tree as plain values, with interpolations resolved.

    Composing takes about 10 ms, and a sweep has hundreds of trials. So each combination of groups is composed once, and
    values are set in a copy, as Hydra would set them. Interpolations are resolved again if they refer to such a value.
    """
    parsed = [_parsed(text) for text in overrides]
    values = [override for override in parsed if override.sets]
    if not all(override.sets or override.chooses for override in parsed):
        return copy.deepcopy(_composed(tuple(overrides)).data)
    choices = tuple(override.text for override in parsed if override.chooses)
    referred = _composed(choices).referred
    read = tuple(value for value in values if value.keys[-1] in referred)
    data = copy.deepcopy(_interpolated(choices, tuple(value.text for value in read)))
    if not all(_set(data, value.keys, value.value) for value in values if value not in read):
        return copy.deepcopy(_composed(tuple(overrides)).data)
    return data


@lru_cache(maxsize=256)
def _interpolated(choices: tuple[str, ...], values: tuple[str, ...]) -> dict[str, Any]:
    """Return the tree with the values set that interpolations read; for unknown keys, raise the error from Hydra."""
    composed = _composed(choices)
    parsed = [_parsed(text) for text in values]
    if not parsed:
        return composed.data
    if not all(_set(copy.deepcopy(composed.data), override.keys, override.value) for override in parsed):
        return _composed((*choices, *values)).data
    config = copy.deepcopy(composed.config)
    for override in parsed:
        OmegaConf.update(config, ".".join(override.keys), override.value)
    return _plain(config, (*choices, *values))


@dataclass(frozen=True)
class _Composed:
    config: DictConfig
    data: dict[str, Any]  # the same values with interpolations resolved
    referred: frozenset[str]  # last parts of the keys that interpolations read


@lru_cache(maxsize=256)
def _composed(overrides: tuple[str, ...]) -> _Composed:
    try:
        config = _tree().compose(ROOT, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(in_one_line(error, overrides)) from error
    interpolated = " ".join(text for text in _texts(OmegaConf.to_container(config)) if "${" in text)
    read_by_resolver = _OPTION_SETTINGS if "${options:" in interpolated else ()
    return _Composed(
        config, _plain(config, overrides), frozenset([*re.findall(r"\w+", interpolated), *read_by_resolver])
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _plain(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(in_one_line(error, overrides)) from error
    return cast(dict[str, Any], data)


def _set(data: dict[str, Any], keys: Sequence[str], value: object) -> bool:
    """Set an existing leaf; return False if there is none at these keys."""
    node: Any = data
    for key in keys[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, dict) or keys[-1] not in node or isinstance(node[keys[-1]], dict):
        return False
    node[keys[-1]] = value
    return True


def _recipe(data: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """Return the recipe without its file's own settings, which only its slots refer to; explain wrong settings."""
    fields = {f.name for f in dataclasses.fields(Recipe)}
    try:
        return Recipe.from_dict({key: value for key, value in data.items() if key in fields})
    except ValueError as error:
        settings = {key: value for key, value in data.items() if key not in fields}
        raise ValueError(_about_setting(settings, overrides) or str(error)) from None


@cache
def prepare() -> None:
    """Register in Hydra the nodes and resolvers that are not in files."""
    store = ConfigStore.instance()
    for name, model in MODELS.items():
        store.store(name, dataclasses.asdict(model), group="model")
    store.store("base", Recipe().to_dict(), group="recipe_base")
    OmegaConf.register_new_resolver("options", _options, replace=True)


_OPTION_SETTINGS = ("stochastic", "rotated", "rht", "signs")


def _options(slot: str, *, _root_: DictConfig) -> str:
    """Return the end of a slot's quantizer for `${options:wgrad.dy}`: how the recipe's settings round and rotate it."""
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


@cache
def _tree() -> ConfigFolder:
    prepare()
    return ConfigFolder(FOLDER)


_YAML_CONSTANTS = ("null", "none", "true", "false", "yes", "no", "on", "off", "nan", "inf")


def spelled(value: object) -> str:
    """Return a value in Hydra's override grammar."""
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in _YAML_CONSTANTS:
            return value
        before_a_quote = r'(\\+)(?="|\Z)'  # elsewhere a backslash is an ordinary character
        return '"' + re.sub(before_a_quote, r"\1\1", value).replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{spelled(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(spelled, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------ errors


_RESOLVER_PREFIX = "ValueError raised while resolving interpolation: "


def check_keys(overrides: Sequence[str]) -> None:
    """Raise ValueError for keys of a multirun that no trial has; Hydra itself checks only expanded trials."""
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
    keys: tuple[str, ...] = ()
    value: Any = None
    sets: bool = False
    chooses: bool = False


@lru_cache(maxsize=4096)
def _parsed(text: str) -> _Parsed:
    """Parse an override; raise ValueError if it is not KEY=VALUE or names an unknown choice."""
    override = _override(text)
    key, value = override.key_or_group, override.value()
    group = key if override.package is None else ""
    if group in GROUPS and not override.is_delete():
        _check_choice(group, value)
    if re.match(r"hydra\b", key):
        raise ValueError(f"unknown key {key!r}: Hydra's own settings have no effect on a trial")
    changes = override.type == OverrideType.CHANGE and override.package is None
    sets = changes and key not in GROUPS and "/" not in key and not isinstance(value, dict) and "${" not in text
    return _Parsed(text, tuple(key.split(".")), value, sets, chooses=changes and key in GROUPS)


def _check_choice(group: str, value: object) -> None:
    if value not in names(group):
        raise ValueError(f"no {group} {value!r}: valid are {nearest_first(str(value), names(group))}")


def _override(text: str) -> Override:
    try:
        override: Override = OverridesParser.create().parse_override(text)
        if not override.key_or_group:
            raise HydraException("no key")
        override.value()
    except HydraException:
        raise ValueError(
            f"{text!r} is not KEY=VALUE in Hydra's grammar; quote a value that has special characters such as <: "
            "KEY='\"VALUE\"'"
        ) from None
    key = override.key_or_group
    if override.is_sweep_override():
        raise ValueError(f"{text!r}: a trial takes one value; write a list as {key}=[…] and a text as {key}='\"…\"'")
    return override


def in_one_line(error: Exception, overrides: Sequence[str]) -> str:
    """Return Hydra's error as one line, replaced by our own text if that can name the valid choices."""
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
    """Name the recipe setting whose value has the wrong type and so caused the error; None if there is none."""
    own = resolved([override for override in overrides if not override.lstrip("+~").startswith("recipe.")])["recipe"]
    for key, value in settings.items():
        kind, actual = type(own.get(key)), type(value)
        if actual is not kind and kind in KINDS and (actual, kind) != (int, float):
            return f"recipe.{key} {value!r}: {KINDS[kind]} is expected, such as {own[key]}"
    return None


def _about_key(key: str, choices: Sequence[str]) -> str | None:
    """Explain which part of a key is unknown in the tree with these groups, and list the valid names; None if known."""
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


def nearest_first(word: str, valid: Sequence[str]) -> str:
    """Return the valid names as text, those most like the word first."""
    near = difflib.get_close_matches(word, valid, n=3, cutoff=0.5)
    return ", ".join([*near, *(v for v in valid if v not in near)])
