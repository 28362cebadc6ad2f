"""Lock open files exclusively; on file systems without locks, continue without the lock after a warning.

`flock` fails on some network and FUSE file systems. There, a warning names the folder and ends with the
caller's advice, which says what still protects the data. The same advice is given only once for a file system.
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
_warned: set[tuple[int, str]] = set()  # (device number of the file system, advice) of each warning given so far


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
