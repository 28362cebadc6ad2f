"""Read the tensors of a folder with safetensors: one model.safetensors, or several files that an index lists."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
JSON_LIMIT = 24_000_000  # bytes
PACKED = ("U8", "F8_E4M3")  # further types in folders with packed weights


@dataclass(frozen=True)
class SafetensorsFolder:
    """The tensors of a folder's safetensors files, which are read when `read` is called."""

    origin: str  # the folder's path, for messages
    places: Mapping[str, Path]  # the file of each tensor
    shapes: Mapping[str, tuple[int, ...]]
    files: tuple[Path, ...]  # the files that contain tensors, and the index if there is one

    @staticmethod
    def open(folder: Path, dtypes: Collection[str] = DTYPES) -> SafetensorsFolder:
        """Open a folder; raise ValueError for a missing or truncated file, or a tensor with a type not in `dtypes`."""
        listed: dict[str, str] = {}
        if (folder / SINGLE).is_file():
            shards = files = [folder / SINGLE]
        elif (folder / INDEX).is_file():
            listed = _read_index(folder / INDEX)
            shards = [folder / name for name in sorted(set(listed.values()))]
            files = [folder / INDEX, *shards]
        else:
            others = sorted(path.name for path in folder.glob("*.bin"))
            hint = f"; {others[0]} is a pickle, which may run any code, so fewbits does not read it" if others else ""
            raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}{hint}")
        places: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for shard in shards:
            for name, shape in _survey(shard, dtypes):
                places[name], shapes[name] = shard, shape
        if missing := sorted(listed.keys() - places.keys()):
            raise ValueError(
                f"{folder / INDEX} lists the tensor {missing[0]}, but {listed[missing[0]]} does not have it: copy or "
                "download both files again"
            )
        return SafetensorsFolder(str(folder), places, shapes, tuple(files))

    @property
    def names(self) -> Collection[str]:
        return self.places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str) -> Tensor:
        return self.stored(name).float()

    def stored(self, name: str) -> Tensor:
        """Return a tensor in the dtype of the file."""
        with safe_open(self.places[name], "pt") as file:
            value: Tensor = file.get_tensor(name)
        return value


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's `weight_map`: the name of each tensor and the name of its file."""
    listed = json_object(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{path} is not an index of safetensors: it has no weight_map from tensor names to file names")
    if outside := [name for name in listed.values() if Path(name).name != name or not name.isprintable()]:
        raise ValueError(f"{path}: {reprlib.repr(outside[0])} is not the name of a file in the folder")
    return listed


def json_object(path: Path, data: bytes | None = None) -> dict[str, Any]:
    """Return the JSON object of a file, or of a header `data` from it, whose keys must differ."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            raise ValueError("a key occurs twice")
        return made

    if data is None and not path.is_file():
        raise ValueError(f"{path}: no such file")
    if data is None and path.stat().st_size > JSON_LIMIT:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: refused, the limit is {JSON_LIMIT}")
    try:
        value = json.loads(path.read_bytes()) if data is None else json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no valid JSON ({str(error)[:80] or 'nested too deeply'})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is expected, not a {type(value).__name__}")
    return value


def _survey(shard: Path, dtypes: Collection[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each tensor of a safetensors file; raise ValueError for types not in `dtypes`."""
    try:
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if part.get_dtype() not in dtypes:
                    raise ValueError(
                        f"{shard}: tensor {name} has the type {part.get_dtype()}; supported are {', '.join(dtypes)}"
                    )
                yield name, tuple(part.get_shape())
    except (SafetensorError, OSError) as error:
        reason = repr(str(error)[:200])
        raise ValueError(
            f"{shard} is missing or no complete safetensors file ({reason}): copy or download it"
        ) from None
