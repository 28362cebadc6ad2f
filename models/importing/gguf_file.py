"""Read a GGUF file, the format of llama.cpp: metadata, and tensors whose values may be packed in 4 or 8 bits.

A file contains, in this order:

    "GGUF"  version  number of tensors  number of metadata entries  metadata entries  description of each tensor
    padding  values of the tensors

All numbers are little-endian. A description lists the sizes of a tensor in reverse order (columns, then rows), so they
are reversed when they are read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from fewbits.models.importing.gguf_types import TYPE_NAMES, TYPES

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
_ALIGNMENT = 32  # of the tensors in bytes, if the metadata have no `general.alignment`
# GGUF's number of a metadata type: the format character of `struct`.
_SCALARS: Final = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Truncated(ValueError):
    """Raised if a GGUF file ends before the data that its header describes, or if its header is damaged."""


@dataclass(frozen=True)
class _Place:
    """The position of a tensor in the file, and its shape and type."""

    shape: tuple[int, ...]
    type: int  # a key of `gguf_types.TYPES`
    begin: int  # the offset of the first byte in the file
    size: int  # bytes


@dataclass(frozen=True)
class GgufFile:
    """An opened GGUF file, whose tensors are read from a memory map when `read` is called."""

    path: Path
    metadata: Mapping[str, Any]
    places: Mapping[str, _Place]
    content: mmap.mmap

    @staticmethod
    def open(path: Path) -> GgufFile:
        """Open a file; raise ValueError if it is not GGUF, is truncated, or has a tensor of an unsupported type."""
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ValueError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            return _parse(path, content)
        except Truncated:
            raise ValueError(
                f"{path} is truncated or damaged: its header cannot be read, or describes more than the file's "
                f"{len(content):,} bytes: copy or download the file again"
            ) from None

    @property
    def origin(self) -> str:
        return str(self.path)

    @property
    def names(self) -> Collection[str]:
        return self.places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.places[name].shape

    def read(self, name: str) -> Tensor:
        place = self.places[name]
        return TYPES[place.type].read(self.content[place.begin : place.begin + place.size]).view(place.shape)


class _Cursor:
    """A position in the file. Each method reads one value there and moves the position to the end of this value."""

    def __init__(self, content: mmap.mmap, at: int) -> None:
        self.content, self.at = content, at

    def bytes(self, count: int) -> bytes:
        if count > len(self.content) - self.at:
            raise Truncated
        self.at += count
        return self.content[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        """Read a number. code: a format character of `struct`."""
        return struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return self.bytes(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """Read a metadata value: a number, a string or a list. kind: GGUF's number of its type."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in _SCALARS:
                code = _SCALARS[inner]
                packed = self.bytes(count * struct.calcsize(f"<{code}"))
                return list(struct.unpack(f"<{count}{code}", packed))
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise Truncated  # an unknown type shows that the bytes before it are damaged
        return self.scalar(_SCALARS[kind])


def _parse(path: Path, content: mmap.mmap) -> GgufFile:
    cursor = _Cursor(content, len(MAGIC))
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ValueError(f"{path} has GGUF version {version}; supported versions are {', '.join(map(str, VERSIONS))}")
    tensors, entries = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    described = []
    for _ in range(tensors):
        name = cursor.string()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        described.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"{path}: general.alignment {alignment!r}: a whole number of 1 or more is expected")
    begin = -(-cursor.at // alignment) * alignment
    places = {name: _place(path, name, shape, kind, begin + offset) for name, shape, kind, offset in described}
    if any(place.begin + place.size > len(content) for place in places.values()):
        raise Truncated
    return GgufFile(path, metadata, places, content)


def _place(path: Path, name: str, shape: tuple[int, ...], kind: int, begin: int) -> _Place:
    if kind not in TYPES:
        is_a = TYPE_NAMES.get(kind, f"number {kind}")
        valid = ", ".join(known.name for known in TYPES.values())
        raise ValueError(f"{path}: tensor {name} has the type {is_a}; supported types are {valid}")
    count = 1
    for size in shape:
        count *= size
    known = TYPES[kind]
    if not shape or shape[-1] % known.values:
        raise ValueError(
            f"{path} is damaged: tensor {name} of type {known.name} has rows whose length is no multiple of "
            f"{known.values}; copy or download the file again"
        )
    return _Place(shape, kind, begin, count // known.values * known.size)
