"""Compose configs from folders of config files with Hydra's public API, and read and write Hydra's overrides.

Hydra needs up to 0.2 s to compose a config, and a study has up to 100 of them, so composed configs are cached on disk.
The name of a cached file is a digest of all that the config is made of, so a cached config is never out of date.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import hydra
import omegaconf
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fewbits.common.atomic import write_atomically
from fewbits.common.from_dict import one_of
from fewbits.kernels.backends.build import cache_folder

ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
_BASE, _ROOT = "fewbits_base", "fewbits_root"  # names in Hydra's store that `compose_file` uses
# Overrides that remove Hydra's own settings of logs, help and sweeps. Trials do not use these settings, and composing a
# config without them takes a third less time.
_WITHOUT_HYDRA = tuple(
    f"~hydra/{group}"
    for group in ("output", "launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging", "env")
)
PATHS = ("data.path", "runtime.runs", "runtime.cache", "branch.parent")  # keys whose values are paths
_YAML_CONSTANTS = ("null", "none", "true", "false", "yes", "no", "on", "off", "nan", "inf")


def compose(folder: Path, root: str, overrides: Sequence[str]) -> DictConfig:
    """Return the config that Hydra composes; its global state is restored, as the caller may itself run inside Hydra.

    root: the main config's name: of a file in `folder`, without `.yaml`, or of a config in Hydra's ConfigStore.
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


def cached(made_of: object, make: Callable[[], DictConfig]) -> dict[str, Any]:
    """Return the config that `make` composes, unresolved, from a cache on disk. made_of: all that determines it."""
    digest = hashlib.sha256(json.dumps([hydra.__version__, omegaconf.__version__, made_of], default=str).encode())
    file = cache_folder() / "composed" / f"{digest.hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):  # the file does not exist yet, or is damaged: compose the config
        if isinstance(data := json.loads(file.read_text("utf-8")), dict):
            return data
    data = cast(dict[str, Any], OmegaConf.to_container(make(), resolve=False))
    text = json.dumps(data)
    if json.loads(text) == data:  # false if a key is no string, because JSON changes it, and for NaN
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text.encode())
    return data


def to_plain(config: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))


def compose_file(file: Path, base: Mapping[str, Any], overrides: Sequence[str], group: str) -> dict[str, Any]:
    """Return the default values `base`, changed by a YAML file, then by the overrides; ValueError for unknown keys.

    group: a key whose value names a further YAML file to include, from the folder GROUP beside `file` if there is one.
    """
    folder, values, files = file.parent / group, list(overrides), [file]
    defaults: list[Any] = [_BASE, file.stem]
    choice: dict[str, Any] = {}
    top = _top_level(file, base)
    if folder.is_dir():
        chosen = [value.partition("=")[2] for value in values if value.startswith(f"{group}=")]
        choice[group] = chosen[-1] if chosen else top.get(group, base[group])
        one_of(group, choice[group], sorted(path.stem for path in folder.glob("*.yaml")))
        defaults.append({f"{group}@_global_": choice[group]})
        values = [value for value in values if not value.startswith(f"{group}=")]
        files.append(folder / f"{choice[group]}.yaml")
    parsed = {text: parse_override(text) for text in values}
    for text, override in parsed.items():
        key = str(override.key_or_group).partition(".")[0]
        if key not in base:
            raise ValueError(f"override {text!r}: unknown key {key!r}: valid keys are {nearest_first(key, list(base))}")
    values = [str(override.input_line) for override in parsed.values()]

    def composed() -> DictConfig:
        store = ConfigStore.instance()
        store.store(_BASE, dict(base))
        store.store(_ROOT, {"defaults": [*defaults, "_self_"]})
        return compose(file.parent, _ROOT, values)

    texts = [path.read_text("utf-8") for path in files]
    try:
        if "defaults" in "".join(texts):  # it may include further files
            return to_plain(composed()) | choice
        return to_plain(OmegaConf.create(cached([file.stem, texts, base, values, choice], composed))) | choice
    except ERRORS as error:
        raise ValueError(f"{file.name}: {' '.join(str(error).split())}") from error


def _top_level(file: Path, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a YAML file's mapping. Raise ValueError for a list where `base` has a mapping or vice versa."""
    try:
        data = yaml.safe_load(file.read_text("utf-8")) or {}
    except (YAMLError, UnicodeError) as error:
        raise ValueError(f"{file.name}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{file.name}: a mapping is expected; valid keys are {', '.join(base)}")
    for key, value in data.items():
        for kind, kind_name in ((dict, "a mapping"), (list, "a list")):
            if isinstance(base.get(key), kind) and isinstance(value, (dict, list)) and not isinstance(value, kind):
                raise ValueError(f"{file.name}: {key}: {kind_name} is expected, not {value!r}")
    return data


def read_override(text: str) -> Override:
    """Parse an override, which may have several values, such as KEY=A,B. Raise ValueError for other text.

    The result's `input_line` is the text in Hydra's grammar, which has most characters of a path only in quotes.
    """
    for written in dict.fromkeys((text, _quoted(text))):
        with contextlib.suppress(HydraException):
            override: Override = OverridesParser.create().parse_override(written)
            override.value()
            if override.key_or_group:
                return override
    special = "quote a value that has special characters such as <: KEY='\"VALUE\"'"
    raise ValueError(f"{text!r} is not KEY=VALUE in Hydra's grammar; {special}")


def _quoted(text: str) -> str:
    """Return KEY=VALUE, KEY=A,B or KEY=[A,B] with quotes around paths and values that are not ASCII."""
    key, equals, value = text.partition("=")
    listed = re.fullmatch(r"\[(.*)\]", value)
    items = (listed[1] if listed else value).split(",")
    bare = (item and item[0] not in "\"'[{" and (key in PATHS or not item.isascii()) for item in items)
    joined = ",".join(spelled(item) if quote else item for item, quote in zip(items, bare, strict=True))
    return f"{key}{equals}[{joined}]" if listed else f"{key}{equals}{joined}"


def parse_override(text: str) -> Override:
    """Parse an override KEY=VALUE. Raise ValueError for other text, and for several values, such as KEY=A,B."""
    override = read_override(text)
    if override.is_sweep_override():
        key = override.key_or_group
        written = f"a list is {key}=[…], a string with a comma {key}='\"…\"'"
        raise ValueError(f"{text!r}: a trial takes one value (several with --multirun); {written}")
    return override


def override_values(text: str) -> list[Any]:
    """Return the values of KEY=A or KEY=A,B; none for an interval or a pattern such as glob(*)."""
    override = read_override(text)
    if override.is_interval_sweep() or isinstance(override.value(), Glob):
        return []
    if not override.is_sweep_override():
        return [override.value()]
    return [v.text if isinstance(v, QuotedString) else str(v) for v in override.sweep_iterator()]


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


def in_one_line(error: Exception) -> str:
    """Return an error of Hydra or OmegaConf as one line that begins with the key, if the error is about one key."""
    text = " ".join(str(error).split()).partition(" full_key:")[0].partition(" Config search path:")[0]
    own = "ValueError raised while resolving interpolation: "  # of our resolver, whose message names the key
    key = getattr(error, "full_key", None)
    return f"{key}: {text}" if key and not text.startswith(own) else text.removeprefix(own)
