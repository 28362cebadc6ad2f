"""Cache composed configs on disk: Hydra needs up to 0.2 s to compose one of them, and a study has up to 100.

The name of a cached file is a digest of everything that determines the config: the config files, the registered models,
the overrides, and the versions of Hydra and OmegaConf. If one of these changes, the name changes, so a cached config is
never out of date.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
import omegaconf
from omegaconf import DictConfig, OmegaConf

from fewbits.common.atomic import write_atomically
from fewbits.kernels.backends.build import cache_folder


def digest_of_files(folder: Path, *more: object) -> str:
    """Return a digest of the paths and texts of all config files in the folder, and of the values `more`."""
    files = {file.relative_to(folder).as_posix(): file.read_bytes() for file in yaml_files(folder)}
    return digest_of_texts({name: data.decode("utf-8", "surrogateescape") for name, data in files.items()}, *more)


def yaml_files(folder: Path) -> list[Path]:
    """Return the YAML files in a folder and its subfolders, sorted, without hidden files and without dangling links.

    Editors create hidden files and dangling links: for example, Emacs makes the link `.#mine.yaml`.
    """
    return [
        file
        for file in sorted(folder.rglob("*.yaml"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def digest_of_texts(files: Mapping[str, str], *more: object) -> str:
    """Return a SHA-256 of files (name → text), of the values `more`, and of the versions of Hydra and OmegaConf."""
    made_from = [hydra.__version__, omegaconf.__version__, sorted(files.items()), *more]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True, default=str).encode()).hexdigest()


def load_or_compose(digest: str, overrides: Sequence[str], compose: Callable[[], DictConfig]) -> dict[str, Any]:
    """Return the config for these overrides from the cache, or call `compose` and cache the config.

    The config is returned as nested plain values, in which interpolations `${…}` are not resolved.
    digest: a digest of all inputs of the config other than the overrides.
    """
    name = hashlib.sha256(json.dumps([digest, *overrides]).encode()).hexdigest()
    file = cache_folder() / "composed" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):  # the file does not exist yet, or is damaged: compose the config
        if isinstance(cached := json.loads(file.read_text("utf-8")), dict):
            return cached
    data = cast(dict[str, Any], OmegaConf.to_container(compose(), resolve=False))
    text = json.dumps(data)
    if json.loads(text) == data:  # false if a key is no string, because JSON changes it, and for NaN
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text.encode())
    return data


def to_config(data: Mapping[str, Any]) -> DictConfig:
    """Return plain values as a config that raises an error for unknown keys, like a config composed by Hydra."""
    config = OmegaConf.create(dict(data))
    OmegaConf.set_struct(config, True)
    return config


def resolve(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config as nested plain values, with interpolations resolved.

    Raise OmegaConf's error for an interpolation without a value, and for `???`, which stands for a missing value.
    """
    if not isinstance(config, DictConfig):
        if "${" not in (text := str(config)) and "???" not in text:
            return copy.deepcopy(dict(config))  # much faster than OmegaConf
        config = to_config(config)
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
