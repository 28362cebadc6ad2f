"""Give one process at a time the lease of a run folder: a file that the process refreshes while it works.

The holder of `lease.json` touches it every HEARTBEAT seconds. The lease is free if the file is missing, if its holder
is a process of this host that has ended, or if its holder is on another host and has not touched it for STALE seconds.
This works on shared file systems: `link` is atomic there, and times are compared with the file system's own clock. If
the file system has locks, processes acquire a lease one after the other, under a lock.

A file `stop` in the run folder asks the holder to end its trial after the present step, with a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fewbits.common.atomic import write_json
from fewbits.common.process import locked

HEARTBEAT = 2.0  # seconds between two touches of the lease file
STALE = 30.0  # seconds without a touch after which a holder on another host counts as dead
NAME, STOP = "lease.json", "stop"
NO_LOCKS = "of two processes that take over the lease of a dead one, both may train; start one after the other"


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease: the content of `lease.json`."""

    host: str
    pid: int
    started: float  # when the process started, in ticks since the host's boot, since a later process may reuse its pid
    token: str  # random; it distinguishes leases of the same process

    @staticmethod
    def here() -> Holder:
        """Return a holder for this process, with a new random token."""
        return Holder(platform.node(), os.getpid(), _start_time(os.getpid()), secrets.token_hex(8))

    @property
    def lives(self) -> bool | None:
        """True if the process still runs, False if not; None if it is on another host, since this host cannot know."""
        if self.host != platform.node():
            return None
        return _start_time(self.pid) == self.started


class Held(ValueError):
    """Raised if another process holds the lease."""

    def __init__(self, folder: Path, holder: Holder) -> None:
        super().__init__(f"{folder}: process {holder.pid} of {holder.host} is working on this trial")


class Lost(Exception):
    """Raised if this process has lost its lease: it has to end without writing, as another one may work there."""

    def __init__(self) -> None:
        super().__init__("the lease is lost: another process has taken it, or the run folder was removed")


def holder(folder: Path) -> Holder | None:
    """Return the holder of the lease in a run folder, or None if the lease is free."""
    current = _read(folder / NAME)
    return current if current and _is_valid(current, folder) else None


def request_stop(folder: Path) -> None:
    (folder / STOP).touch()


def stop_requested(folder: Path) -> bool:
    return (folder / STOP).exists()


def _is_valid(current: Holder, folder: Path) -> bool:
    if current.lives is not None:
        return current.lives
    try:
        # abs: a touch far in the future, which means that a clock was set back, also counts as old.
        return abs(_now(folder) - (folder / NAME).stat().st_mtime) < STALE
    except FileNotFoundError:
        return False


@contextmanager
def leased(folder: Path) -> Iterator[threading.Event]:
    """Hold a run folder's lease while the `with` block runs; raise Held if another process holds it.

    The folder is created if it is missing. Yield an event that is set if this process loses the lease meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = Holder.here()
    # To take over the lease of a dead holder takes two steps, between which the lease seems free: hence the lock.
    with (folder / ".lease.lock").open("a") as lock, locked(lock, NO_LOCKS):
        _acquire(folder, mine)
    lost, ended = threading.Event(), threading.Event()
    beat = threading.Thread(target=_keep, args=(folder / NAME, mine, lost, ended), daemon=True)
    beat.start()
    try:
        yield lost
    finally:
        ended.set()
        beat.join()
        if _read(folder / NAME) == mine:
            for name in (STOP, NAME):
                (folder / name).unlink(missing_ok=True)


def _acquire(folder: Path, mine: Holder) -> None:
    path = folder / NAME
    if (current := holder(folder)) is not None:
        raise Held(folder, current)
    for left_behind in (path, folder / STOP):  # by an earlier holder, which was killed
        left_behind.unlink(missing_ok=True)
    own = folder / f".{NAME}.{mine.token}.partial"
    write_json(own, asdict(mine))
    try:
        os.link(own, path)
    except FileExistsError:  # on a file system without locks
        raise Held(folder, _read(path) or mine) from None
    finally:
        own.unlink(missing_ok=True)


def _keep(path: Path, mine: Holder, lost: threading.Event, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT):
        try:
            if _read(path) != mine:
                lost.set()
                return
            os.utime(path)
        except OSError:
            continue  # the file system is unreachable; after STALE seconds a process on another host may take over


def _read(path: Path) -> Holder | None:
    """Return the holder in a lease file; None if the file is missing or damaged. Raise OSError if it cannot be read."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _now(folder: Path) -> float:
    """Return the file system's present time, from a new file in `folder`; this host's time if none can be created."""
    probe = folder / f".now.{os.getpid()}.{threading.get_ident()}.partial"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _start_time(pid: int) -> float:
    """Return when a process started, in ticks since the host's boot; -1 if it does not exist or is a zombie.

    On systems without /proc, return 0 for a process that exists.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self").exists():
            return -1.0
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return -1.0
        except PermissionError:
            pass
        return 0.0
    return -1.0 if fields[0] in "ZX" else float(fields[19])
