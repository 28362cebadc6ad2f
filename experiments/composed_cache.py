"""Keep composed configs on the disk: Hydra takes up to a fifth of a second for each, and a study has up to a hundred.

A cached config is found by a digest of everything that determines it: the config files, the registered models, the
overrides, and the versions of Hydra and OmegaConf. So a cached config is never out of date: if one of these changes,
the old file is not read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import omegaconf
from omegaconf import DictConfig, OmegaConf

from fewbits.common.atomic import write_atomically
from fewbits.kernels.backends.build import cache_folder


def digest_of_files(folder: Path, *more: object) -> str:
    """Return a digest of all config files in the folder and of `more`, as `digest_of_texts` does."""
    files = {file.relative_to(folder).as_posix(): file.read_bytes() for file in yaml_files(folder)}
    return digest_of_texts({name: data.decode("utf-8", "surrogateescape") for name, data in files.items()}, *more)


def yaml_files(folder: Path) -> list[Path]:
    """Return the config files in a folder and its subfolders; hidden files and those that are not regular are left out.

    Editors create such files: for example, Emacs makes the dangling link `.#mine.yaml`.
    """
    return [
        file
        for file in sorted(folder.rglob("*.yaml"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def digest_of_texts(files: Mapping[str, str], *more: object) -> str:
    """Return a digest of these files by name, of `more`, and of the versions of Hydra and OmegaConf."""
    made_from = [hydra.__version__, omegaconf.__version__, sorted(files.items()), *more]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True, default=str).encode()).hexdigest()


def load_or_compose(digest: str, overrides: Sequence[str], compose: Callable[[], DictConfig]) -> DictConfig:
    """Return the config of these overrides from the cache, or compose it; `digest` is that of its other inputs."""
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
    """Return a mapping as a config that refuses unknown keys, as configs composed by Hydra do."""
    if not isinstance(data, dict):
        raise ValueError("a mapping is expected")
    config = OmegaConf.create(data)
    OmegaConf.set_struct(config, True)
    return config
