"""Keep composed configs on the disk: Hydra takes a tenth of a second for each, and a study composes up to a hundred.

A config is found by a digest of all that it is composed from: the config files, the registered models, the overrides,
and the versions of Hydra and OmegaConf. So a cached config is never out of date, and files of old versions are unused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
import omegaconf
from omegaconf import DictConfig, OmegaConf

from fewbits.common.atomic import write_atomically
from fewbits.kernels.backends.build import cache_folder


def digest_of_files(folder: Path, *more: object) -> str:
    """Return a digest of all YAML files below the folder, of further data, and of the composing libraries."""
    files = {file.relative_to(folder).as_posix(): file.read_text("utf-8") for file in folder.rglob("*.yaml")}
    made_from = [hydra.__version__, omegaconf.__version__, sorted(files.items()), *more]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True, default=str).encode()).hexdigest()


def load_or_compose(digest: str, overrides: Sequence[str], compose: Callable[[], DictConfig]) -> DictConfig:
    """Return the config of these overrides, from the cache or newly composed. digest: of what it is composed from."""
    name = hashlib.sha256(json.dumps([digest, *overrides]).encode()).hexdigest()
    file = cache_folder() / "composed" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):  # there is none yet, or it cannot be read
        return _config(json.loads(file.read_text("utf-8")))
    config = compose()
    text = json.dumps(OmegaConf.to_container(config, resolve=False), allow_nan=True)
    if _config(json.loads(text)) == config:  # JSON has no keys but strings
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, text.encode())
    return config


def _config(data: Any) -> DictConfig:
    """Return data as a config that refuses unknown keys, as Hydra's own do."""
    if not isinstance(data, dict):
        raise ValueError("a mapping is expected")
    config = OmegaConf.create(data)
    OmegaConf.set_struct(config, True)
    return config
