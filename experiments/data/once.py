"""Make data only once and keep them in the cache, even if many trials start at the same time.

One process makes a folder, under a temporary name and a lock, while others wait; then it renames the folder to its
final name, which identifies the data's inputs. If the process is killed, the next one removes the incomplete folder.
"""

import shutil
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from fewbits.common import terminal
from fewbits.common.process import locked
from fewbits.kernels.backends.build import cache_folder

T = TypeVar("T")
NO_LOCKS = (  # the end of a warning about a file system without locks
    "processes that make the same data at once can disturb each other: start one process first, or set FEWBITS_CACHE "
    "to a folder on another file system"
)


class Damaged(ValueError):
    """An error that is raised if data on disk are incomplete or differ from what was written."""


def default_cache() -> Path:
    """Return the default folder of corpora: `data` in fewbits' cache (FEWBITS_CACHE, else ~/.cache/fewbits)."""
    return cache_folder() / "data"


def opened_or_made(folder: Path, open_: Callable[[Path], T], make: Callable[[Path], None]) -> T:
    """Return `open_(folder)`; if that raises FileNotFoundError or `Damaged`, make the folder anew and open it.

    make: writes the content into an empty temporary folder, which is afterwards renamed to `folder`.
    """
    try:
        return open_(folder)
    except (FileNotFoundError, Damaged):
        pass
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock_path = folder.with_name(f"{folder.name}.lock")
    with ExitStack() as stack:
        terminal.show(f"making {folder}, once")
        stack.callback(terminal.clear)
        stack.enter_context(locked(stack.enter_context(open(lock_path, "w")), NO_LOCKS))
        try:
            return open_(folder)  # another process may have made the folder meanwhile
        except FileNotFoundError:
            pass
        except Damaged as error:
            warnings.warn(f"{error}; these data are now made again", RuntimeWarning, stacklevel=2)
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
