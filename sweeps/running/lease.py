"""Who works on a trial: a file in its folder that one worker holds and refreshes while it does.

A lease lies in `lease.json`. Its holder touches it every few seconds; it is free again when the file is gone, when its
holder is a process of this host that has ended, or when nobody has touched it for `STALE` seconds. All of it works on
a shared file system: leases are made by link, which is atomic there, and times are compared with the file system's own
clock. Those who would take a lease do so one by one, under a lock, as far as the file system has locks. Below it, on
one host, lies the lock of the run folder.
"""

from __future__ import annotations

import contextlib
import fcntl
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

HEARTBEAT = 2.0  # seconds
STALE = 30.0
NAME = "lease.json"


@dataclass(frozen=True)
class Holder:
    host: str
    pid: int
    started: float  # when its process was, in ticks since the host's boot: pids are used again
    token: str

    @staticmethod
    def here() -> Holder:
        return Holder(platform.node(), os.getpid(), _started(os.getpid()), secrets.token_hex(8))

    @property
    def lives(self) -> bool | None:
        """None: on another host, one cannot tell."""
        if self.host != platform.node():
            return None
        return _started(self.pid) == self.started


class Held(Exception):
    """Another worker holds the lease."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(f"worked on by process {holder.pid} of {holder.host}")


def holder(folder: Path) -> Holder | None:
    """Who works on a trial now."""
    found = _read(folder / NAME)
    return found if found and _works(found, folder) else None


def _works(found: Holder, folder: Path) -> bool:
    if found.lives is not None:
        return found.lives
    try:
        return abs(_now(folder) - (folder / NAME).stat().st_mtime) < STALE  # of tomorrow: a clock was set back
    except FileNotFoundError:
        return False


@contextmanager
def leased(folder: Path) -> Iterator[threading.Event]:
    """Hold the lease, or raise Held. The event given is set when it has been lost."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = Holder.here()
    with _one_by_one(folder):
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
            (folder / NAME).unlink(missing_ok=True)


@contextmanager
def _one_by_one(folder: Path) -> Iterator[None]:
    """To take over the lease of a dead holder is more than one step; for a moment nobody seems to hold it."""
    with (folder / ".lease.lock").open("a") as lock:
        with contextlib.suppress(OSError):  # without locks: two steps of which a third contender might come in between
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _acquire(folder: Path, mine: Holder) -> None:
    path = folder / NAME
    left = _read(path)
    if left and _works(left, folder):
        raise Held(left)
    if left or path.exists():
        aside = folder / f".{NAME}.{mine.token}.partial"
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            pass
        else:
            if _read(aside) != left:  # somebody was faster, and this is theirs
                with contextlib.suppress(FileExistsError):
                    os.link(aside, path)
            aside.unlink()
    own = folder / f".{NAME}.{mine.token}.own.partial"
    write_json(own, asdict(mine))
    try:
        os.link(own, path)
    except FileExistsError:
        other = _read(path)
        raise Held(other or mine) from None
    finally:
        own.unlink()


def _keep(path: Path, mine: Holder, lost: threading.Event, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT):
        try:
            if _read(path) != mine:
                lost.set()
                return
            os.utime(path)
        except OSError:
            continue  # a file system that is away for a moment; if for long, another worker takes over


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _now(folder: Path) -> float:
    """By the clock of the file system."""
    probe = folder / f".now.{os.getpid()}.{threading.get_ident()}.partial"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _started(pid: int) -> float:
    """-1: no such process, or one that has ended and waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1.0 if Path("/proc/self").exists() else _alive(pid)
    return -1.0 if fields[0] in "ZX" else float(fields[19])


def _alive(pid: int) -> float:
    """Where there is no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return -1.0
    except PermissionError:
        return 0.0
    return 0.0
