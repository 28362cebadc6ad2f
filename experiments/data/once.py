"""Things made once and kept in the cache, however many trials start at the same time.

What is kept appears whole, by a rename, under a name that says what it was made from. One process makes it under a
lock while the others wait; what a killed one has left half made is swept away by the next.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from fewbits.common import terminal
from fewbits.common.locks import locked
from fewbits.kernels.backends.build import cache_folder

T = TypeVar("T")
NO_LOCKS = "processes that make the same data at once can disturb each other: start one first, or set FEWBITS_CACHE"


class Damaged(ValueError):
    """What was kept is not what was once made."""


def default_cache() -> Path:
    """Where corpora lie unless told otherwise: `data` in fewbits' cache (FEWBITS_CACHE, else ~/.cache/fewbits)."""
    return cache_folder() / "data"


@contextmanager
def _said(text: str) -> Iterator[None]:
    """On a terminal, while it is so: it can take a minute."""
    terminal.show(text)
    try:
        yield
    finally:
        terminal.clear()


def opened_or_made(folder: Path, open_: Callable[[Path], T], make: Callable[[Path], None]) -> T:
    """`open_(folder)`; where it is not there or `Damaged`, after `make` has filled an empty folder in its place."""
    try:
        return open_(folder)
    except (FileNotFoundError, Damaged):
        pass
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_path = folder.with_name(f"{folder.name}.lock")
    with _said(f"making {folder}, once"), open(lock_path, "w") as lock, locked(lock, NO_LOCKS):
        try:
            return open_(folder)  # another process may have made it meanwhile
        except FileNotFoundError:
            pass
        except Damaged as error:
            warnings.warn(f"{error}; making it again", RuntimeWarning, stacklevel=2)
            shutil.rmtree(folder)
        making = folder.with_name(f"{folder.name}.making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        try:
            make(making)
            making.rename(folder)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
    return open_(folder)
