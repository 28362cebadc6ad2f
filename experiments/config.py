"""From the words of a command line to a trial: Hydra composes the config tree, dataclasses check it.

The tree is `experiments/config/`, plus a node for every model of the registry. Groups are chosen by name
(`recipe=mor/block`), fields set by path (`training.steps=500`). Unknown names and keys, and values of a wrong type, are
ValueErrors of one line that say what would be right.
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
    """The trial that the overrides describe, and how to run it.

    >>> trial, runtime = load_trial(["model=nemotron-nano", "recipe=mor/block", "seed=1"])
    """
    data = resolved(overrides)
    runtime = from_dict(Runtime, data.pop("runtime", {}), "runtime")
    if isinstance(data.get("recipe"), Mapping):
        data["recipe"] = _recipe(data["recipe"], overrides)
    return Trial.from_dict(data), runtime


def load_recipe(name: str, settings: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe of the tree by name, with some of its settings or fields changed.

    >>> load_recipe("mor/block", {"threshold": 0.05})
    """
    return recipe_by_words(name, [f"{key}={spelled(value)}" for key, value in (settings or {}).items()])


def recipe_by_words(name: str, words: Sequence[str]) -> Recipe:
    """The same with settings as on a command line.

    >>> recipe_by_words("nvfp4", ["keep.last=2", "stochastic=[dgrad.dy]"])
    """
    overrides = [f"recipe={spelled(name)}", *(f"recipe.{word}" for word in words)]
    return _recipe(resolved(overrides)["recipe"], overrides)


def compose_file(file: Path, base: Mapping[str, Any], overrides: Sequence[str], group: str) -> dict[str, Any]:
    """A YAML file over default values, with changes to its keys; `group=NAME` takes in NAME.yaml of the folder of that
    name beside the file, if there is one. As plain values, interpolations resolved."""
    folder, words, top = file.parent / group, list(overrides), _top_level(file, base)
    defaults: list[Any] = [_BASE_OF_FILES, file.stem]
    choice: dict[str, Any] = {}
    if folder.is_dir():
        said = [word.partition("=")[2] for word in words if word.startswith(f"{group}=")]
        choice[group] = said[-1] if said else top.get(group, base[group])
        one_of(group, choice[group], sorted(path.stem for path in folder.glob("*.yaml")))
        defaults.append({f"{group}@_global_": choice[group]})
        words = [word for word in words if not word.startswith(f"{group}=")]
    store = ConfigStore.instance()
    store.store(_BASE_OF_FILES, dict(base))
    store.store(_ROOT_OF_FILES, {"defaults": [*defaults, "_self_"]})
    for text in words:
        key = str(_override(text).key_or_group).partition(".")[0]
        if key not in base:
            raise ValueError(f"unknown key {key!r}: valid are {nearest_first(key, list(base))}")
    try:
        config = ConfigFolder(file.parent.resolve()).compose(_ROOT_OF_FILES, words)
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{file.name}: {' '.join(str(error).split())}") from error
    return cast(dict[str, Any], data) | choice


def _top_level(file: Path, base: Mapping[str, Any]) -> dict[str, Any]:
    """Of a file before Hydra sees it, which says of a list in a mapping's place neither where nor what."""
    try:
        found = yaml.safe_load(file.read_text())
    except YAMLError as error:
        raise ValueError(f"{file.name}: {' '.join(str(error).split())}") from None
    if not isinstance(found or {}, dict):
        raise ValueError(f"{file.name}: a mapping is expected, of {', '.join(base)}")
    for key, value in (found or {}).items():
        for kind, called in ((dict, "a mapping"), (list, "a list")):
            if isinstance(base.get(key), kind) and isinstance(value, (dict, list)) and not isinstance(value, kind):
                raise ValueError(f"{file.name}: {key}: {called} is expected, not {value!r}")
    return found or {}


def names(group: str) -> list[str]:
    """The choices of a group, `recipe` say."""
    stored = MODELS if group == "model" else ()
    files = (FOLDER / group).rglob("*.yaml")
    return [*stored, *sorted(f.relative_to(FOLDER / group).with_suffix("").as_posix() for f in files)]


def resolved(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed tree as plain values, interpolations resolved.

    Composing takes hundredths of a second, and a sweep has hundreds of trials. So a choice of groups is composed once
    and values are set in a copy, as Hydra would; interpolations are resolved again where one reads such a value.
    """
    words = [_parsed(text) for text in overrides]
    values = [word for word in words if word.sets]
    if not all(word.sets or word.chooses for word in words):
        return copy.deepcopy(_composed(tuple(overrides)).data)
    choices = tuple(word.text for word in words if word.chooses)
    referred = _composed(choices).referred
    read = tuple(word for word in values if word.keys[-1] in referred)
    data = copy.deepcopy(_interpolated(choices, tuple(word.text for word in read)))
    if not all(_set(data, word.keys, word.value) for word in values if word not in read):
        return copy.deepcopy(_composed(tuple(overrides)).data)
    return data


@lru_cache(maxsize=256)
def _interpolated(choices: tuple[str, ...], values: tuple[str, ...]) -> dict[str, Any]:
    """The tree with some values set that interpolations read; or that there is no place for, as Hydra tells of it."""
    composed = _composed(choices)
    words = [_parsed(text) for text in values]
    if not words:
        return composed.data
    if not all(_set(copy.deepcopy(composed.data), word.keys, word.value) for word in words):
        return _composed((*choices, *values)).data
    config = copy.deepcopy(composed.config)
    for word in words:
        OmegaConf.update(config, ".".join(word.keys), word.value)
    return _plain(config, (*choices, *values))


@dataclass(frozen=True)
class _Composed:
    config: DictConfig
    data: dict[str, Any]  # the same, interpolations resolved
    referred: frozenset[str]  # the last words of keys that interpolations read


@lru_cache(maxsize=256)
def _composed(overrides: tuple[str, ...]) -> _Composed:
    try:
        config = _tree().compose(ROOT, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(in_one_line(error, overrides)) from error
    interpolated = " ".join(text for text in _texts(OmegaConf.to_container(config)) if "${" in text)
    return _Composed(config, _plain(config, overrides), frozenset(re.findall(r"\w+", interpolated)))


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
    """Set a leaf that there is; False where there is none."""
    node: Any = data
    for key in keys[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if not isinstance(node, dict) or keys[-1] not in node or isinstance(node[keys[-1]], dict):
        return False
    node[keys[-1]] = value
    return True


def _recipe(data: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """A recipe file may define settings of its own beside the fields, for its slots to refer to. They end here."""
    fields = {f.name for f in dataclasses.fields(Recipe)}
    try:
        return Recipe.from_dict({key: value for key, value in data.items() if key in fields})
    except ValueError as error:
        settings = {key: value for key, value in data.items() if key not in fields}
        raise ValueError(_about_setting(settings, overrides) or str(error)) from None


@cache
def prepare() -> None:
    """Tell Hydra of what is not in files."""
    store = ConfigStore.instance()
    for name, model in MODELS.items():
        store.store(name, dataclasses.asdict(model), group="model")
    store.store("base", Recipe().to_dict(), group="recipe_base")
    OmegaConf.register_new_resolver("options", _options, replace=True)


def _options(slot: str, stochastic: Sequence[str], rotated: Sequence[str], size: int, signs: object) -> str:
    """`${options:wgrad.dy,…}`: how a slot's spelling ends, by what a recipe's settings say of rounding and rotation."""
    for name, words, valid in (("stochastic", stochastic, SLOTS), ("rotated", rotated, GEMMS)):
        if isinstance(words, str) or not isinstance(words, Sequence):
            raise ValueError(f"recipe.{name} {words!r}: a list is expected, of {', '.join(valid)}")
        for word in words:
            one_of(f"recipe.{name}", word, valid)
    text = ":stochastic" if slot in stochastic else ""
    if slot.split(".")[0] in rotated and size:
        text += f":rht{size}" + (f":signs={signs}" if signs is not None else "")
    return text


@cache
def _tree() -> ConfigFolder:
    prepare()
    return ConfigFolder(FOLDER)


_WORDS_OF_ITS_OWN = ("null", "none", "true", "false", "yes", "no", "on", "off", "nan", "inf")


def spelled(value: object) -> str:
    """In Hydra's grammar."""
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in _WORDS_OF_ITS_OWN:
            return value
        before_a_quote = r'(\\+)(?="|\Z)'  # only there is a backslash no letter like others
        return '"' + re.sub(before_a_quote, r"\1\1", value).replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{spelled(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(spelled, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------ errors


_OF_A_RESOLVER = "ValueError raised while resolving interpolation: "


def check_keys(overrides: Sequence[str]) -> None:
    """ValueError for keys of a sweep of trials that no trial has: Hydra composes only what it makes of them."""
    for text in overrides:
        try:
            word: Override = OverridesParser.create().parse_override(text)
            values = [str(value) for value in word.sweep_iterator()] if word.is_sweep_override() else [word.value()]
        except HydraException:
            raise ValueError(f"{text!r} is not KEY=VALUE or KEY=VALUE,VALUE in Hydra's grammar") from None
        key = word.key_or_group
        if key in GROUPS and word.package is None:
            for value in values:
                _check_choice(key, value)
        elif word.type != OverrideType.CHANGE or re.split(r"\W", key)[0] in (*GROUPS, "hydra"):
            continue
        elif (complaint := _about_key(key, [])) is not None:
            raise ValueError(complaint)


@dataclass(frozen=True)
class _Word:
    """KEY=VALUE. `sets`: a value at a dotted key; `chooses`: from a group; neither: what is left to Hydra."""

    text: str
    keys: tuple[str, ...] = ()
    value: Any = None
    sets: bool = False
    chooses: bool = False


@lru_cache(maxsize=4096)
def _parsed(text: str) -> _Word:
    """ValueError for what is not KEY=VALUE, and for choices that there are not."""
    word = _override(text)
    key, value = word.key_or_group, word.value()
    group = key if word.package is None else ""
    if group in GROUPS and not word.is_delete():
        _check_choice(group, value)
    if re.match(r"hydra\b", key):
        raise ValueError(f"unknown key {key!r}: Hydra's own settings have no effect on a trial")
    changes = word.type == OverrideType.CHANGE and word.package is None
    sets = changes and key not in GROUPS and "/" not in key and not isinstance(value, dict) and "${" not in text
    return _Word(text, tuple(key.split(".")), value, sets, chooses=changes and key in GROUPS)


def _check_choice(group: str, value: object) -> None:
    if value not in names(group):
        raise ValueError(f"no {group} {value!r}: valid are {nearest_first(str(value), names(group))}")


def _override(text: str) -> Override:
    try:
        word: Override = OverridesParser.create().parse_override(text)
        if not word.key_or_group:
            raise HydraException("no key")
        word.value()
    except HydraException:
        raise ValueError(
            f"{text!r} is not KEY=VALUE in Hydra's grammar; a value with special characters, < say, wants quotes of "
            "its own: KEY='\"VALUE\"'"
        ) from None
    key = word.key_or_group
    if word.is_sweep_override():
        raise ValueError(f"{text!r}: a trial takes one value; for a list write {key}=[…], for a text {key}='\"…\"'")
    return word


def in_one_line(error: Exception, overrides: Sequence[str]) -> str:
    """What Hydra says, if need be in words of ours that name the choices."""
    text = " ".join(str(error).split()).removeprefix(_OF_A_RESOLVER).partition(" full_key:")
    if str(error).startswith(_OF_A_RESOLVER):  # `_options` names the key itself
        return text[0]
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key and re.search(rf"'{re.escape(key)}'|^ {re.escape(key)}\b", f"{text[0]}\n{text[2]}", re.MULTILINE):
            choices = [o for o in overrides if o != override and "." not in o.partition("=")[0]]
            return _about_key(key, choices) or f"{key}: {text[0]}"
    return text[0]


def _about_setting(settings: Mapping[str, Any], overrides: Sequence[str]) -> str | None:
    """Which of a recipe's settings, given as another kind of value than it has, is behind the mistake; None if none."""
    own = resolved([word for word in overrides if not word.lstrip("+~").startswith("recipe.")])["recipe"]
    for key, value in settings.items():
        kind, given = type(own.get(key)), type(value)
        if given is not kind and kind in KINDS and (given, kind) != (int, float):
            return f"recipe.{key} {value!r}: {KINDS[kind]} is expected, such as {own[key]}"
    return None


def _about_key(key: str, choices: Sequence[str]) -> str | None:
    """Where in the tree, with those choices of groups, the key stops being known, and what there is; None if it is."""
    node: Any = OmegaConf.create(resolved(choices))
    done: list[str] = []
    words = key.split(".")
    for word in words:
        if not isinstance(node, DictConfig) or word not in node:
            break
        node = node[word]
        done.append(word)
    if len(done) == len(words):
        return None
    where = ".".join(done) or "a trial"
    if not isinstance(node, DictConfig):
        return f"{where} is a value and has no {'.'.join(words[len(done) :])!r}"
    there = dict.fromkeys((*map(str, node), *(() if done else GROUPS)))
    return f"unknown key {key!r}: {where} has {nearest_first(words[len(done)], list(there))}"


def nearest_first(word: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, valid, n=3, cutoff=0.5)
    return ", ".join([*near, *(v for v in valid if v not in near)])
