"""Read a published model from a path, or from a Python package that contains it."""

from __future__ import annotations

import re
from pathlib import Path

from fewbits.models.importing.gguf import read_gguf
from fewbits.models.importing.huggingface import read_folder
from fewbits.models.importing.layouts import Published
from fewbits.models.importing.packages import packaged_model, source_path


def read_published(source: str, name: str | None = None) -> Published:
    """Return a published model, without reading its tensors yet.

    source: the path of a Hugging Face folder or of a GGUF file, or a model in a package, such as `package:smollm2`.
    name: the name to give the model; None: the packaged model's name, or one made from the folder's or file's name.
    """
    path, packaged = source_path(source), packaged_model(source)
    if name is None:
        name = packaged.name if packaged else _name(path)
    return read_folder(path, name) if path.is_dir() else read_gguf(path, name)


def _name(path: Path) -> str:
    """Return a model name made from a path: its last component in lower case, with `-` for special characters."""
    stem = path.resolve().name if path.is_dir() else path.stem
    return re.sub(r"[^\w.]+", "-", stem).strip("-.").lower() or "imported"
