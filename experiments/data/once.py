"""Make data once and keep it in the cache, however many trials start at the same time.

A finished folder appears by a rename, under a name that identifies what it was made from. One process makes it under a
lock while the others wait. If that process is killed, the next one removes its incomplete folder.
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
    """An error: cached data differ from what was written."""


def default_cache() -> Path:
    """Return the default folder of corpora: `data` in fewbits' cache (FEWBITS_CACHE, else ~/.cache/fewbits)."""
    return cache_folder() / "data"


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """Show the text on a terminal while the body runs, which can take a minute."""
    terminal.show(text)
    try:
        yield
    finally:
        terminal.clear()


def opened_or_made(folder: Path, open_: Callable[[Path], T], make: Callable[[Path], None]) -> T:
    """Return `open_(folder)`. If the folder is missing or `Damaged`, let `make` fill a new one first."""
    try:
        return open_(folder)
    except (FileNotFoundError, Damaged):
        pass
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_path = folder.with_name(f"{folder.name}.lock")
    with _progress(f"making {folder}, once"), open(lock_path, "w") as lock, locked(lock, NO_LOCKS):
        try:
            return open_(folder)  # another process may have made it meanwhile
        except FileNotFoundError:
            pass
        except Damaged as error:
            warnings.warn(f"{error}; the data are made again", RuntimeWarning, stacklevel=2)
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
