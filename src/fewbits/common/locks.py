"""Lock open files exclusively, with a fallback for file systems that have no locks.

`flock` fails on some network and FUSE file systems. On these, a process continues without the lock, after one warning
that names the folder and says what still protects the data.
"""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

UNSUPPORTED = frozenset((errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL))
_warned: set[tuple[int, str]] = set()  # (file system, advice) of each warning that this process has given


@contextmanager
def locked(file: IO[Any], advice: str, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on an open file while the `with` block runs.

    advice: the end of the warning on a file system without locks: what still protects the data, and what to do.
    wait: if another process has locked the file, wait for it; False: raise BlockingIOError instead.
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
            fcntl.flock(file, fcntl.LOCK_UN)  # explicitly: a process forked meanwhile has the file open as well


def _warn(file: IO[Any], error: OSError, advice: str) -> None:
    key = os.fstat(file.fileno()).st_dev, advice
    if key not in _warned:
        _warned.add(key)
        folder = os.path.dirname(os.path.abspath(file.name))
        text = f"{folder}: this file system has no file locks ({error.strerror}): {advice}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
