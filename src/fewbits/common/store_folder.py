"""Convert the name of a store, as in `--runs NAME` and `runtime.runs=NAME`, to a path, and a path to an option."""

from __future__ import annotations

import re
import shlex
from pathlib import Path


def store_folder(text: str) -> Path:
    """Return the path of a store, with `~` expanded.

    Raise ValueError for a URL such as `s3://bucket`, which would otherwise become a local folder with the name `s3:`.
    """
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
