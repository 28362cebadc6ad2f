"""Files and folders that are either there, whole and on the disk, or not there at all.

What is written gets a hidden name beside its own, `.NAME.TOKEN.partial`, is flushed to the disk and is then renamed
into place. A process killed halfway leaves such a name behind and nothing else; `remove_leftovers` clears them away.
"""

from __future__ import annotations

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
    """A new file whose content is on the disk, not only in memory, once the block is over."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Put on the disk which names a folder holds."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write or replace a file by these bytes, or by what the callback writes to the open file it is given."""
    partial = _beside(path)
    try:
        with synced_file(partial) as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def folder_atomically(path: Path) -> Iterator[Path]:
    """A folder to fill, with `synced_file`; it bears its name, which must be free, once the block is over."""
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
    """So that nobody, at no time, finds half of it under its name."""
    aside = _beside(path)
    os.rename(path, aside)
    shutil.rmtree(aside)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left in a folder. Only its one writer may ask for that."""
    for path in folder.glob(f".*{_SUFFIX}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_json(path: Path, value: Any) -> None:
    """As people read it; keys in the order given. What JSON cannot say, NaN and infinity among it, is refused."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}; say null for what is not a finite number") from error
    write_atomically(path, f"{text}\n".encode())


def write_parquet(path: Path, frame: pd.DataFrame) -> None:
    """Without its index. Equal frames give equal bytes, as long as pandas and pyarrow are the same."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    write_atomically(path, lambda file: pq.write_table(table, file, compression="zstd"))


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
