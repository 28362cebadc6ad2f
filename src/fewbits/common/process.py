"""Set variables, handle signals, hold file locks and name missing extras for the duration of a `with` block.

`pip install fewbits` installs what quantization, and import and export of models need. Everything else is in extras.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

# What `flock` raises on network and FUSE file systems that have no locks.
UNSUPPORTED = frozenset((errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL))
_warned: set[tuple[int, str]] = set()  # (device number of the file system, advice) of each warning given so far


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables while the `with` block runs, and restore their earlier values afterwards."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in values if name in before})


@contextmanager
def handled(by: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Call the handler `by` for these signals while the `with` block runs; then restore the earlier handlers."""
    before = {number: signal.signal(number, by) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def locked(file: IO[Any], advice: str, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on an open file while the `with` block runs.

    advice: the end of the warning that is given on a file system without locks: what still protects the data, and what
        the user can do.
    wait: if another process has locked the file, True waits for it and False raises BlockingIOError.
    """
    held = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _warn(file, error, advice)
        held = False
    try:
        yield
    finally:
        if held:
            # Unlock explicitly: a process that was forked meanwhile also has the file open, which would keep the lock.
            fcntl.flock(file, fcntl.LOCK_UN)


def _warn(file: IO[Any], error: OSError, advice: str) -> None:
    key = os.fstat(file.fileno()).st_dev, advice
    if key not in _warned:
        _warned.add(key)
        folder = os.path.dirname(os.path.abspath(file.name))
        text = f"{folder}: this file system has no file locks ({error.strerror}): {advice}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)


# ------------------------------------------------------------------------------------------------ extras

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
