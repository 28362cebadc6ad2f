"""Prevent a sweep from filling the disk of its store: estimate what trials will write, and pause the sweep in time.

A trial is started only if the disk has room for its checkpoints, in addition to the checkpoints that running trials
still have to write. If other programs fill the disk meanwhile, the running trials are stopped while there is still room
for one more checkpoint of each. The sweep continues when there is room again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fewbits.sweeps.planning.cost import checkpoint_bytes, disk
from fewbits.sweeps.planning.plan import Planned
from fewbits.sweeps.running.store import OVER, state

MARGIN = 256 << 20  # bytes that have to stay free when a trial starts, for tables, logs and MLflow's database
HINT = "`fewbits prune` lists what can be removed; the sweep continues when there is room"
RESERVE = 64 << 20  # running trials stop if less is free than these bytes plus one checkpoint of each of them


def free_bytes(store: Path) -> int:
    """Return the free bytes of the disk on which a store is, or will be if the folder does not exist yet."""
    return shutil.disk_usage(next(path for path in (store.absolute(), *store.absolute().parents) if path.exists())).free


def estimate(missing: Sequence[Planned], store: Path) -> str:
    """Return as text the disk space that these trials still need, the free space, and whether it is too little."""
    need, free = sum(map(_still_to_write, missing)), free_bytes(store)
    text = f"{size(need)} of checkpoints, {size(free)} free on the disk"
    return text if need + MARGIN <= free else f"{text}: too little, so the sweep will pause"


@dataclass
class DiskSpace:
    """A driver's checks of a store's free disk space: `admits` before it starts a trial, `is_low` while trials run."""

    store: Path
    log: Callable[[str], None]  # prints a line
    free: Callable[[Path], int] = free_bytes  # returns the free bytes of a store's disk
    paused: bool = False  # at the last check, the space was too small to start a trial

    def admits(self, planned: Planned, running: Sequence[Planned]) -> bool:
        """Tell whether the disk has room to start a trial beside the running ones.

        Log a line when the disk gets too full to start trials, and when it has room again.
        """
        need, free = _still_to_write(planned), self.free(self.store)
        room = free - sum(map(_still_to_write, running)) - MARGIN
        if need <= room and self.paused:
            self.log(f"the disk has room again ({size(free)} free): the sweep continues")
        if need > room and not self.paused:
            begun = f"no trial is started beside the {len(running)} running ones" if running else "paused"
            self.log(
                f"{begun}: the disk of {self.store} has {size(free)} free, and {planned.folder.path.name} needs "
                f"{size(need)}; {HINT}"
            )
        self.paused = need > room
        return not self.paused

    def is_low(self, running: Sequence[Planned]) -> bool:
        """Tell whether running trials have to stop: less is free than RESERVE plus one checkpoint of each of them.

        Log a line if they have to stop and the sweep was not paused before.
        """
        free = self.free(self.store)
        low = bool(running) and free < RESERVE + sum(checkpoint_bytes(planned.trial) for planned in running)
        if low and not self.paused:
            self.log(
                f"paused: the disk of {self.store} has only {size(free)} free: running trials stop at a checkpoint; "
                f"{HINT}"
            )
            self.paused = True
        return low


def size(count: float) -> str:
    """Return a number of bytes with a unit, for example `1.4 GB` (10⁹ bytes)."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            return f"{count / bytes_:.3g} {unit}"
    return f"{count:.0f} bytes"


def bytes_below(path: Path) -> int:
    """Return the total bytes of all files below a folder; files that vanish meanwhile are not counted."""
    total = 0
    for file in path.rglob("*"):
        try:
            total += 0 if file.is_dir() else file.lstat().st_size
        except FileNotFoundError:
            continue
    return total


def _still_to_write(planned: Planned) -> int:
    """Return how many bytes of checkpoints a trial still adds to those in its run folder; 0 if it has ended.

    One checkpoint is counted in addition, since an old checkpoint is removed only after a new one is written.
    """
    folder = planned.folder
    if state(folder) in OVER and folder.has(planned.keep):  # `has` raises for a damaged result
        return 0
    there = bytes_below(folder.checkpoints) + bytes_below(folder.kept)
    return max(0, disk([planned]) + checkpoint_bytes(planned.trial) - there)
