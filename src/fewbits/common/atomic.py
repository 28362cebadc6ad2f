"""Write files and folders atomically: at any time, a file or folder is either complete or does not exist.

It is first written under a hidden name in the same folder, `.NAME.TOKEN.partial`, flushed to the disk, and renamed. A
process that is killed before leaves only the hidden name, which `remove_leftovers` removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import pandas as pd

_SUFFIX = ".partial"


@contextmanager
def synced_file(path: Path) -> Iterator[BinaryIO]:
    """Create a new file, yield it open for writing, and flush it to the disk when the `with` block ends."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's list of files to the disk, so that a new name survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write or replace a file atomically. content: the bytes, or a function that writes them to an open file."""
    partial = _beside(path)
    try:
        with synced_file(partial) as file:
            content(file) if callable(content) else file.write(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def create_once(path: Path, content: bytes) -> None:
    """Create a file with this content; do nothing if the file exists or another process creates it first."""
    partial = _beside(path)
    try:
        with synced_file(partial) as file:
            file.write(content)
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def folder_atomically(path: Path) -> Iterator[Path]:
    """Yield a new hidden folder, whose files the block writes with `synced_file`, and rename it to `path` at the end.

    `path` must not exist yet. If the block raises, remove the folder.
    """
    partial = _beside(path)
    partial.mkdir()
    try:
        yield partial
        sync_folder(partial)
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so that no process finds an incomplete folder under its name."""
    aside = _beside(path)
    os.rename(path, aside)
    shutil.rmtree(aside)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a folder; meanwhile no process may write to the folder."""
    for path in folder.glob(f".*{_SUFFIX}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write a value atomically as indented JSON; raise ValueError for NaN and infinities, which JSON does not have."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}; JSON has no NaN and no infinity: write null instead") from error
    write_atomically(path, f"{text}\n".encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing or unreadable, or its content is no JSON object."""
    try:
        return checked_json(path)
    except (OSError, ValueError):
        return None


def checked_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file is missing; raise ValueError for any other content."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON (is it damaged?): {error}: restore or remove the file") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object: restore or remove the file")
    return content


def write_parquet(path: Path, frame: pd.DataFrame) -> None:
    """Write a DataFrame without its index, atomically; the same versions of pandas and pyarrow give equal bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    write_atomically(path, lambda file: pq.write_table(table, file, compression="zstd"))


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
