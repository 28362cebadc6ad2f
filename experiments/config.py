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
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, get_type_hints

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fewbits.common.from_dict import from_dict, one_of
from fewbits.experiments.composition import (
    ERRORS,
    cached,
    compose,
    in_one_line,
    nearest_first,
    parse_override,
    spelled,
    to_plain,
)
from fewbits.experiments.config_files import (
    FOLDER,
    GROUPS,
    ROOT,
    Folders,
    check_choice,
    folders,
    is_search_path,
    name_of,
    register_chosen,
    yaml_files,
)
from fewbits.experiments.trial import Runtime, Trial
from fewbits.models.networks.presets import MODELS
from fewbits.models.recipe import GEMMS, SLOTS, Recipe

if TYPE_CHECKING:
    from torch import nn

    from fewbits.models.observer import Observer
    from fewbits.models.quantize import Quantization

_FIELDS = tuple(f.name for f in dataclasses.fields(Recipe))
_KINDS = {float: "a number", int: "a whole number", str: "a string"}  # names of types in error messages
HYDRA_SETTINGS = (
    "of hydra.*, only searchpath and, with --multirun, sweeper, job.name and callbacks are used; runtime.runs=DIR sets "
    "the folder of results"
)


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
    """Return a recipe by its name (from `fewbits list recipes`) or the path of a YAML file, with changed settings.

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


def quantize(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    seed: int = 0,
    observer: Observer | None = None,
    keep_weights: bool = True,
) -> Quantization:
    """Replace the linear layers of the model's blocks, in place, by quantized ones with the same parameters.

    Create optimizers afterwards, because a sampler adds a parameter `bit_scale` to every layer with noise.
    recipe: a recipe, its name (from `fewbits list recipes`), or the path of a YAML file.
    seed: the rounding seed, from which the seeds of stochastic rounding, noise and rotation signs are derived.
    observer: collects statistics of the quantized operands.
    keep_weights: True quantizes and casts each weight once per update and keeps the result; False does so in every
        forward and backward pass, to save memory.

    >>> quantization = quantize(model, "nvfp4")
    >>> quantization.attach(model, optimizer)   # or quantization.begin(step) before every forward
    >>> print(quantization)                     # how much is quantized, and what is not
    """
    from fewbits.models.quantize import quantize  # here, since it imports all of the quantized layers

    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return quantize(model, chosen, seed=seed, observer=observer, keep_weights=keep_weights)


def resolved(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the composed config as nested plain values, with interpolations `${…}` resolved.

    Hydra composes one config for each choice of groups' configs; values are then set in a copy, as Hydra would.
    """
    own = folders(overrides)
    parsed = [_parsed(text) for text in overrides if not is_search_path(text)]
    for override in parsed:
        if override.chooses:
            check_choice(override.key, override.value, own)
    simple = [override for override in parsed if override.sets or override.chooses]
    if len(simple) < len(parsed):  # others, for example +KEY=VALUE, depend on the order, so Hydra applies them all
        try:
            return _resolved(_composed(tuple(override.text for override in parsed), own))
        except ValueError:
            resolved([*own.overrides, *(override.text for override in simple)])  # a clearer error, if one is wrong
            raise
    choices = tuple(override.text for override in parsed if override.chooses)
    values = [override for override in parsed if override.sets]
    seeds = [override for override in values if override.key == "seed" and type(override.value) is int]
    if _reads_seed(choices, own) or any("seed}" in override.text for override in values):
        seeds = []
    others = tuple(override.text for override in values if override not in seeds)
    data = copy.deepcopy(_with_values(choices, others, own))
    return data | {"seed": seeds[-1].value} if seeds else data


@lru_cache(maxsize=256)
def _with_values(choices: tuple[str, ...], values: tuple[str, ...], own: Folders) -> dict[str, Any]:
    config = copy.deepcopy(_composed(choices, own))
    for override in map(_parsed, values):
        try:
            OmegaConf.update(config, override.key, override.value, merge=True)
        except OmegaConfBaseException as error:
            raise ValueError(_about_key(_composed(choices, own), override.key) or in_one_line(error)) from error
    return _resolved(config)


@lru_cache(maxsize=256)
def _reads_seed(choices: tuple[str, ...], own: Folders) -> bool:
    return "seed}" in str(_composed(choices, own))  # an interpolation ${seed}


@lru_cache(maxsize=256)
def _composed(overrides: tuple[str, ...], own: Folders) -> DictConfig:
    """Return the config that Hydra composes; raise ValueError, in one line, for Hydra's errors."""
    prepare(own)
    try:
        data = cached([_sources(), own.texts, overrides], lambda: compose(FOLDER, ROOT, [*own.overrides, *overrides]))
    except ERRORS as error:
        raise ValueError(in_one_line(error)) from error
    config = OmegaConf.create(data)
    OmegaConf.set_struct(config, True)
    return config


def _resolved(config: DictConfig) -> dict[str, Any]:
    try:
        return to_plain(config)
    except ERRORS as error:
        raise ValueError(in_one_line(error)) from error


@cache
def _sources() -> list[Any]:
    """Return what fewbits' own part of a composed config is made of."""
    files = {str(file.relative_to(FOLDER)): file.read_text("utf-8") for file in yaml_files(FOLDER)}
    return [files, {name: dataclasses.asdict(model) for name, model in MODELS.items()}, _defaults()]


def _defaults() -> dict[str, Any]:
    return default_values(Trial) | {"runtime": default_values(Runtime)}


def default_values(kind: type) -> dict[str, Any]:
    """Return the default values of a dataclass's fields, nested; fields without a default are left out."""
    hints, values = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            values[field.name] = default_values(hints[field.name])
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
    return values


def recipe_and_settings(overrides: Sequence[str]) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe that the overrides choose, and its settings: the keys in its file that Recipe does not have."""
    data = resolved(overrides)["recipe"]
    return _recipe(data, overrides), _settings(data)


def _recipe(data: Mapping[str, Any], overrides: Sequence[str]) -> Recipe:
    """Return the recipe in the section `recipe` of a config, under the chosen name; ValueError for invalid fields."""
    settings = _settings(data)
    for key in settings:
        # Only words are compared: a setting such as `dgrad_dy` is like a field, but no misspelling.
        if key.isalpha() and (near := difflib.get_close_matches(key, _FIELDS, 1, cutoff=0.75)):
            raise ValueError(f"unknown key recipe.{key}: did you mean {near[0]}? A recipe has {', '.join(_FIELDS)}")
    parsed = [_parsed(text) for text in overrides if not is_search_path(text)]
    chosen = [override.value for override in parsed if override.key == "recipe" and override.chooses]
    if chosen and not any(override.key == "recipe.name" for override in parsed):
        data = {**data, "name": name_of(chosen[-1])}  # a file that includes another recipe's file has that one's name
    try:
        return Recipe.from_dict({key: value for key, value in data.items() if key not in settings})
    except ValueError as error:
        raise ValueError(_about_setting(settings, overrides) or str(error)) from None


def _settings(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in _FIELDS}


def _about_setting(settings: Mapping[str, Any], overrides: Sequence[str]) -> str | None:
    """Return a message about the first float, int or string setting of another type than in the recipe's file."""
    own = resolved([override for override in overrides if not override.lstrip("+~").startswith("recipe.")])["recipe"]
    for key, value in settings.items():
        kind, actual = type(own.get(key)), type(value)
        if actual is not kind and kind in _KINDS and (actual, kind) != (int, float):
            return f"recipe.{key} {value!r}: {_KINDS[kind]} is expected, such as {own[key]}"
    return None


def _about_key(config: DictConfig, key: str) -> str | None:
    """Return a message about the unknown part of a dotted key, with the valid names; None if the whole key is known."""
    node, parts = OmegaConf.to_container(config, resolve=False), key.split(".")
    for number, part in enumerate(parts):
        known = ".".join(parts[:number])
        if not isinstance(node, dict):
            return f"{known} is a single value and has no key {'.'.join(parts[number:])!r}"
        if part not in node:
            valid = dict.fromkeys((*map(str, node), *(() if known else GROUPS)))
            return f"unknown key {key!r}: {known or 'a trial'} has the keys {nearest_first(part, list(valid))}"
        node = node[part]
    return None


def prepare(own: Folders) -> None:
    """Register with Hydra what config files use but do not define: defaults, models, a resolver, and chosen files."""
    _register_defaults()
    register_chosen(own)


@cache
def _register_defaults() -> None:
    store = ConfigStore.instance()
    store.store("defaults_of_a_trial", _defaults())
    for name, model in MODELS.items():
        store.store(name, dataclasses.asdict(model), group="model")
    OmegaConf.register_new_resolver("options", _options, replace=True)


def _options(slot: str, *, _root_: DictConfig) -> str:
    """Resolve `${options:SLOT}` in a recipe's file: the end of the slot's quantizer, such as `:stochastic:rht16`."""
    stochastic, rotated, size, signs = (_root_.recipe.get(key) for key in ("stochastic", "rotated", "rht", "signs"))
    for name, slots, valid in (("stochastic", stochastic, SLOTS), ("rotated", rotated, GEMMS)):
        if isinstance(slots, str) or not isinstance(slots, Sequence):
            raise ValueError(f"recipe.{name} {slots!r}: a list is expected, with values of {', '.join(valid)}")
        for item in slots:
            one_of(f"recipe.{name}", item, valid)
    text = ":stochastic" if slot in stochastic else ""
    if slot.split(".")[0] in rotated and size:
        text += f":rht{size}" + (f":signs={signs}" if signs is not None else "")
    return text


@dataclasses.dataclass(frozen=True)
class _Parsed:
    """An override: it sets a value, chooses a group's config, or neither: only Hydra applies +KEY=VALUE."""

    text: str
    key: str
    value: Any
    sets: bool
    chooses: bool


@lru_cache(maxsize=4096)
def _parsed(text: str) -> _Parsed:
    """Parse an override; raise ValueError if it is not KEY=VALUE."""
    override = parse_override(text)
    key, value, text = override.key_or_group, override.value(), str(override.input_line)
    if key == "branch.parent" and isinstance(value, (int, float)):  # a run's hash such as 12345678 or 12e45678
        value = text.partition("=")[2].strip()
        text = f"{key}={spelled(value)}"
    if is_hydra_setting(key):
        raise ValueError(f"{key}: {HYDRA_SETTINGS}")
    in_group = key in GROUPS and override.package is None
    changes = override.type == OverrideType.CHANGE and override.package is None
    return _Parsed(text, key, value, changes and not in_group and "/" not in key, changes and in_group)


def is_hydra_setting(key: str) -> bool:
    """Tell whether an override's key is one of Hydra's own settings, such as `hydra.run.dir` or `hydra/launcher`."""
    return key.lstrip("+~").replace("/", ".").split(".")[0] == "hydra"
