"""Read a published model, named by its path or by the name of a Python package that contains it."""

from __future__ import annotations

import re
from pathlib import Path

from fewbits.models.importing.gguf import read_gguf
from fewbits.models.importing.huggingface import read_folder
from fewbits.models.importing.packages import packaged_model, source_path
from fewbits.models.importing.published import Published


def read_published(source: str, name: str | None = None) -> Published:
    """Return a published model, whose tensors are not read yet.

    source: a Hugging Face folder, a GGUF file, or the name of a model in a package, such as `package:smollm2`.
    name: the model's name; None: that of the folder, the file or the package's model.
    """
    path, packaged = source_path(source), packaged_model(source)
    if name is None:
        name = packaged.name if packaged else _name(path)
    return read_folder(path, name) if path.is_dir() else read_gguf(path, name)


def _name(path: Path) -> str:
    stem = path.resolve().name if path.is_dir() else path.stem
    return re.sub(r"[^\w.]+", "-", stem).strip("-.").lower() or "imported"
