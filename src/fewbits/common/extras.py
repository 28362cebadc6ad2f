"""Name the extra that a missing Python package belongs to, in one line with the command that installs it.

`pip install fewbits` installs what quantization, and import and export of models need. Everything else is in extras.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {  # extra in pyproject.toml → packages that our modules import
    "train": ("pandas", "pyarrow", "rich"),
    "sweep": ("ray", "mlflow"),
    "report": ("matplotlib", "scipy", "statsmodels", "jupytext", "nbformat", "nbclient", "markdown_it", "jinja2"),
    "gguf": ("gguf",),
    "bpe": ("tokenizers",),
    "data": ("datasets", "huggingface_hub"),
    "eval": ("lm_eval",),
    "titan": ("torchtitan",),
}
_EXTRA_OF = {package: extra for extra, packages in EXTRAS.items() for package in packages}


class MissingExtra(ImportError, ValueError):
    """Raised if a package of an extra is missing. It is a ValueError, too, so that commands print it as one line."""


@contextmanager
def extras(whole: str = "") -> Iterator[None]:
    """Raise MissingExtra in place of ModuleNotFoundError if the `with` block imports a missing package of an extra.

    whole: an extra that contains `train` and has all that the block needs but Ray and MLflow, if the caller knows it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        extra = whole if whole and _EXTRA_OF[package] in ("train", "report") else _EXTRA_OF[package]
        text = f"the Python package {package} is not installed: pip install 'fewbits[{extra}]'"
        raise MissingExtra(text, name=package) from None
