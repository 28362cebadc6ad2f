"""Find the folder of a store from `--runs NAME` or `runtime.runs=NAME`, and measure folders and disks."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

BENCH = "bench"  # the folder of a store with the results of `fewbits bench`, in a file for each device


def store_folder(text: str) -> Path:
    """Return the path of a store, with `~` expanded; raise ValueError for a URL such as `s3://bucket`."""
    if scheme := re.match(r"([A-Za-z][\w+.-]*):/", text):
        path = re.sub(r"^file:/+", "/", text)
        mount = "mount it (for example with rclone or s3fs) and name that folder"
        advice = f"write {path}" if scheme[1].lower() == "file" else mount
        raise ValueError(f"store {text}: a store is a folder, and {scheme[1]}:// is not supported: {advice}")
    return Path(text).expanduser()


def runs_option(store: Path) -> str:
    """Return ` --runs STORE`, to append to a command that shall use this store; empty text for the default store."""
    if store.resolve() == Path("runs").resolve():
        return ""
    shown = store.relative_to(Path.cwd()) if store.is_relative_to(Path.cwd()) else store
    return f" --runs {shlex.quote(str(shown))}"


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that a path is on; the path need not exist."""
    return shutil.disk_usage(next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())).free


def bytes_below(path: Path) -> int:
    """Return the total bytes of all files below a folder; files that vanish meanwhile are not counted."""
    total = 0
    for file in path.rglob("*"):
        try:
            total += 0 if file.is_dir() else file.lstat().st_size
        except FileNotFoundError:
            continue
    return total


def size(count: float) -> str:
    """Return a number of bytes with a unit, for example `1.4 GB` (10⁹ bytes)."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bytes_:
            return f"{count / bytes_:.3g} {unit}"
    return f"{count:.0f} bytes"
