"""The store as a path: every option or setting that names a store goes through here."""

from __future__ import annotations

import re
from pathlib import Path


def store_folder(text: str) -> Path:
    """Return the store's folder with `~` expanded. ValueError for a URL, which would become a folder called `s3:`."""
    if found := re.match(r"([A-Za-z][\w+.-]*):/", text):
        path = re.sub(r"^file:/+", "/", text)
        mount = "mount it (with rclone or s3fs, say) and name that folder"
        advice = f"write {path}" if found[1].lower() == "file" else mount
        raise ValueError(f"store {text}: a store is a folder, and {found[1]}:// is not supported: {advice}")
    return Path(text).expanduser()
