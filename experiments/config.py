"""From the words of a command line to a trial: Hydra composes the config tree, dataclasses check it.

The tree is `experiments/config/`, plus a node for every model of the registry. Groups are chosen by name
(`recipe=mor/block`), fields set by path (`training.steps=500`). Unknown names and keys, and values of a wrong type, are
ValueErrors of one line that say what would be right.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fewbits.experiments.trial import Runtime, Trial
from fewbits.models.from_dict import from_dict
from fewbits.models.recipe import Recipe
from fewbits.models.registry import MODELS

FOLDER = Path(__file__).parent / "config"
ROOT = "trial"


def load_trial(overrides: Sequence[str] = ()) -> tuple[Trial, Runtime]:
    """The trial that the overrides describe, and how to run it.

    >>> trial, runtime = load_trial(["model=nemotron-nano", "recipe=mor/block", "seed=1"])
    """
    data = resolved(overrides)
    runtime = from_dict(Runtime, data.pop("runtime"), "runtime")
    data["recipe"] = _recipe(data.get("recipe", {}))
    return Trial.from_dict(data), runtime


def load_recipe(name: str, settings: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe of the tree by name, with some of its settings or fields changed.

    >>> load_recipe("mor/block", {"threshold": 0.05})
    """
    changes = [f"recipe.{key}={_spelled(value)}" for key, value in (settings or {}).items()]
    return _recipe(resolved([f"recipe={name}", *changes])["recipe"])


def names(group: str) -> list[str]:
    """The choices of a group, `recipe` say."""
    stored = MODELS if group == "model" else ()
    files = (FOLDER / group).rglob("*.yaml")
    return [*stored, *sorted(f.relative_to(FOLDER / group).with_suffix("").as_posix() for f in files)]


def resolved(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed tree as plain values, interpolations resolved."""
    _prepare()
    try:
        with _hydra():
            config = compose(ROOT, overrides=list(overrides))
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_in_one_line(error, overrides)) from error
    assert isinstance(data, dict)
    return data  # type: ignore[return-value]


def _recipe(data: Mapping[str, Any]) -> Recipe:
    """A recipe file may define settings of its own beside the fields, for its slots to refer to. They end here."""
    fields = {f.name for f in dataclasses.fields(Recipe)}
    return Recipe.from_dict({key: value for key, value in data.items() if key in fields})


@cache
def _prepare() -> None:
    store = ConfigStore.instance()
    for name, model in MODELS.items():
        store.store(name, dataclasses.asdict(model), group="model")
    store.store("base", Recipe().to_dict(), group="recipe_base")
    OmegaConf.register_new_resolver("options", _options, replace=True)


def _options(slot: str, stochastic: Sequence[str], rotated: Sequence[str], size: int, signs: object) -> str:
    """`${options:wgrad.dy,…}`: how a slot's spelling ends, by what a recipe's settings say of rounding and rotation."""
    text = ":stochastic" if slot in stochastic else ""
    if slot.split(".")[0] in rotated and size:
        text += f":rht{size}" + (f":signs={signs}" if signs is not None else "")
    return text


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra is one for the whole process: set up for one composition, and put back as it was."""
    holder = GlobalHydra.instance()
    before = holder.hydra
    holder.clear()
    try:
        with initialize_config_dir(str(FOLDER), version_base=None):
            yield
    finally:
        holder.hydra = before


def _spelled(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{_spelled(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_spelled, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------ errors


def _in_one_line(error: Exception, overrides: Sequence[str]) -> str:
    text = " ".join(str(error).split())
    if match := re.search(r"(?:Could not find|In '[^']*': Could not find) '([^']+)'", text):
        group, _, name = match[1].partition("/")
        if (valid := names(group)) and name:
            return f"no {group} {name!r}: valid are {_nearest_first(name, valid)}"
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key and re.search(rf"'{re.escape(key)}'|full_key: {re.escape(key)}\b", text):
            return _about_key(key, [o for o in overrides if o != override and "." not in o.partition("=")[0]])
    return text


def _about_key(key: str, choices: Sequence[str]) -> str:
    """Where in the tree, with those choices of groups, the key stops being known, and what there is."""
    node: Any = OmegaConf.create(resolved(choices))
    done: list[str] = []
    for word in key.split("."):
        if not isinstance(node, DictConfig) or word not in node:
            break
        node = node[word]
        done.append(word)
    where = ".".join(done) or "a trial"
    valid = [str(k) for k in node] if isinstance(node, DictConfig) else []
    if not valid:
        return f"{where} is a value and has no {key[len(where) + 1 :]!r}"
    if len(done) == len(key.split(".")):
        return f"{key} cannot be set like this: it has the fields {', '.join(valid)}"
    return f"unknown key {key!r}: {where} has {_nearest_first(key.split('.')[len(done)], valid)}"


def _nearest_first(word: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, valid, n=3, cutoff=0.5)
    return ", ".join([*near, *(v for v in valid if v not in near)])
