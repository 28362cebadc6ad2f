"""Compose configs from folders of config files with Hydra's public API, and read and write Hydra's overrides."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fewbits.common.from_dict import one_of
from fewbits.experiments.composed_cache import digest_of_texts, load_or_compose, resolve

ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
_BASE, _ROOT = "fewbits_defaults", "fewbits_root"  # names in Hydra's store that `compose_file` uses
# Overrides that remove Hydra's own settings of logs, help and sweeps. Trials do not use these settings, and composing a
# config without them takes a third less time.
_WITHOUT_HYDRA = tuple(
    f"~hydra/{group}"
    for group in ("output", "launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging", "env")
)
_YAML_CONSTANTS = ("null", "none", "true", "false", "yes", "no", "on", "off", "nan", "inf")


def compose(folder: Path, root: str, overrides: Sequence[str]) -> DictConfig:
    """Return the config that Hydra composes from a main config and the overrides.

    folder: the folder with the config files.
    root: the main config's name: of a file in `folder`, without `.yaml`, or of a config in Hydra's ConfigStore.
    Hydra's global state is restored afterwards, because the caller may itself run inside Hydra.
    """
    ours = _initialised(folder.resolve())
    instance = GlobalHydra.instance()
    outer, instance.hydra = instance.hydra, ours
    try:
        return hydra.compose(root, [*_WITHOUT_HYDRA, *overrides])
    except HydraException as error:
        if isinstance(error.__cause__, OmegaConfBaseException) and not str(error):
            raise error.__cause__ from None
        raise
    finally:
        instance.hydra = outer


@cache
def _initialised(folder: Path) -> Any:
    """Return Hydra's state for a config folder; cached, because each initialisation searches for Hydra plugins."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(folder), version_base=None):
            return GlobalHydra.instance().hydra
    finally:
        GlobalHydra.instance().hydra = outer


def compose_file(file: Path, base: Mapping[str, Any], overrides: Sequence[str], group: str) -> dict[str, Any]:
    """Return plain data: the default values `base`, changed by a YAML file, then changed by the overrides.

    group: a key whose value names a further YAML file to include, from the folder GROUP beside `file`. If there is no
        such folder, the key has no special meaning.
    Raise ValueError for keys that `base` does not have.
    """
    folder, values, top = file.parent / group, list(overrides), _top_level(file, base)
    defaults: list[Any] = [_BASE, file.stem]
    choice: dict[str, Any] = {}
    if folder.is_dir():
        chosen = [value.partition("=")[2] for value in values if value.startswith(f"{group}=")]
        choice[group] = chosen[-1] if chosen else top.get(group, base[group])
        one_of(group, choice[group], sorted(path.stem for path in folder.glob("*.yaml")))
        defaults.append({f"{group}@_global_": choice[group]})
        values = [value for value in values if not value.startswith(f"{group}=")]
    for text in values:
        key = str(parse_override(text).key_or_group).partition(".")[0]
        if key not in base:
            raise ValueError(f"override {text!r}: unknown key {key!r}: valid keys are {nearest_first(key, list(base))}")

    def composed() -> DictConfig:
        store = ConfigStore.instance()
        store.store(_BASE, dict(base))
        store.store(_ROOT, {"defaults": [*defaults, "_self_"]})
        return compose(file.parent, _ROOT, values)

    try:
        data = resolve(_cached(file, [folder / f"{name}.yaml" for name in choice.values()], base, values, composed))
    except ERRORS as error:
        raise ValueError(f"{file.name}: {' '.join(str(error).split())}") from error
    return data | choice


def _cached(
    file: Path,
    included: Sequence[Path],
    base: Mapping[str, Any],
    values: Sequence[str],
    composed: Callable[[], DictConfig],
) -> dict[str, Any]:
    """Return the config from the cache as plain values, or call `composed`, which composes the config.

    base: the default values of all keys. values: the overrides.
    The cache's key contains these two and the texts of `file` and `included`. If one of these files has a defaults
    list, it may include further files, whose changes the key would miss, so the cache is not used.
    """
    texts = {path.relative_to(file.parent).as_posix(): path.read_text("utf-8") for path in (file, *included)}
    if any(re.search(r"^[\"']?defaults\b", text, re.MULTILINE) for text in texts.values()):
        return cast(dict[str, Any], OmegaConf.to_container(composed(), resolve=False))
    return load_or_compose(digest_of_texts(texts, file.stem, base), values, composed)


def _top_level(file: Path, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a YAML file's content. Raise ValueError if the content is not a mapping.

    base: the default values. Also raise ValueError for a list where `base` has a mapping, or vice versa: Hydra's own
    error would name neither the key nor the file.
    """
    try:
        data = yaml.safe_load(file.read_text()) or {}
    except YAMLError as error:
        raise ValueError(f"{file.name}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file.name}: a mapping is expected; valid keys are {', '.join(base)}")
    for key, value in data.items():
        for kind, kind_name in ((dict, "a mapping"), (list, "a list")):
            if isinstance(base.get(key), kind) and isinstance(value, (dict, list)) and not isinstance(value, kind):
                raise ValueError(f"{file.name}: {key}: {kind_name} is expected, not {value!r}")
    return data


def parse_override(text: str) -> Override:
    """Parse an override KEY=VALUE. Raise ValueError for other text, and for several values, such as KEY=A,B."""
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
        raise ValueError(
            f"{text!r}: a trial takes one value: `fewbits train --multirun` takes several; write a list as {key}=[…] "
            f"and a string that contains a comma as {key}='\"…\"'"
        )
    return override


def override_values(text: str) -> list[Any]:
    """Return the values of an override: one value of KEY=A, or all values of a sweep such as KEY=A,B.

    The list is empty for an interval or a pattern such as glob(*). Raise ValueError if the text is not an override.
    """
    try:
        override: Override = OverridesParser.create().parse_override(text)
        if override.is_interval_sweep() or isinstance(override.value(), Glob):
            return []
        return [str(v) for v in override.sweep_iterator()] if override.is_sweep_override() else [override.value()]
    except HydraException:
        raise ValueError(f"{text!r} is not KEY=VALUE or KEY=VALUE,VALUE in Hydra's grammar") from None


def spelled(value: object) -> str:
    """Return a value as text that an override can contain after KEY=, with quotes where Hydra's grammar needs them."""
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in _YAML_CONSTANTS:
            return value
        before_a_quote = r'(\\+)(?="|\Z)'  # Hydra reads a backslash as an escape only before a quote
        return '"' + re.sub(before_a_quote, r"\1\1", value).replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{spelled(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(spelled, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def nearest_first(name: str, valid: Sequence[str]) -> str:
    """Return the valid names, separated by commas; those most similar to `name` come first."""
    near = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
    return ", ".join([*near, *(v for v in valid if v not in near)])
