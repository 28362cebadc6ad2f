"""Shared inputs for tests of data: folders of tokens, and a cache in which built-in corpora are made once."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from fewbits.experiments.data.corpus import Corpus, DataConfig
from fewbits.experiments.data.load import load
from tests.once import shared_folder


def bin_folder(
    folder: Path,
    train: Sequence[int],
    validation: Sequence[int] = range(100),
    dtype: str = "<u2",
    meta: Mapping[str, object] | None = None,
) -> Path:
    """Write a folder of tokens as nanoGPT's scripts do, plus meta.json if `meta` is given; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tokens in (("train", train), ("val", validation)):
        (folder / f"{name}.bin").write_bytes(np.array(tokens, dtype).tobytes())
    if meta is not None:
        (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def bin_corpus(folder: Path, train: Sequence[int]) -> Corpus:
    return load(DataConfig(kind="bin", path=str(bin_folder(folder, train))), folder / "cache")


def shared_home(factory: pytest.TempPathFactory) -> Path:
    """Return one FEWBITS_CACHE for all files and workers of a test run: making the corpus `python` takes seconds."""
    return shared_folder(factory) / "fewbits-cache"


def shared_cache(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of corpora in the shared cache."""
    return shared_home(factory) / "data"
