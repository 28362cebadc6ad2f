"""Read safetensors: one file, or a folder with model.safetensors or with several files that an index lists.

A tensor stays in the memory map of its file until its values are used.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
PACKED = (torch.uint8, torch.float8_e4m3fn)  # further types in folders with packed weights
JSON_LIMIT = 24_000_000  # bytes


@dataclass(frozen=True)
class SafetensorsFolder:
    """The tensors of a folder's safetensors files, in the dtypes of the files."""

    origin: str  # the folder's path, for messages
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...]  # the files that contain tensors, and the index if there is one

    @staticmethod
    def open(folder: Path, dtypes: Collection[torch.dtype] = DTYPES) -> SafetensorsFolder:
        """Open a folder; raise ValueError for a missing or truncated file, or a tensor with a type not in `dtypes`."""
        listed: dict[str, str] = {}
        if (folder / SINGLE).is_file():
            shards = files = [folder / SINGLE]
        elif (folder / INDEX).is_file():
            listed = read_index(folder / INDEX)
            shards = [folder / name for name in sorted(set(listed.values()))]
            files = [folder / INDEX, *shards]
        else:
            others = sorted(path.name for path in folder.glob("*.bin"))
            hint = f"; {others[0]} is a pickle, which may run any code, so fewbits does not read it" if others else ""
            raise ValueError(f"{folder} has no {SINGLE} and no {INDEX}{hint}")
        tensors = read_files(shards, listed)
        for name, tensor in tensors.items():
            if tensor.dtype not in dtypes:
                valid = ", ".join(map(dtype_name, dtypes))
                raise ValueError(
                    f"{folder}: tensor {name} has the type {dtype_name(tensor.dtype)}; supported are {valid}"
                )
        return SafetensorsFolder(str(folder), tensors, tuple(files))

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name].float()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_index(path: Path) -> dict[str, str]:
    """Return the index's `weight_map`: the name of each tensor and the name of its file."""
    listed = json_object(path).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{path} is not an index of safetensors: it has no weight_map from tensor names to file names")
    if wrong := [name for name in listed.values() if Path(name).name != name or not name.endswith(".safetensors")]:
        raise ValueError(f"{path}: {reprlib.repr(wrong[0])} is not the name of a safetensors file in the folder")
    return listed


def read_files(paths: Iterable[Path], listed: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of several files by name; listed: by the index, the name of the file that has a tensor."""
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for path in paths:
        for name, tensor in read_file(path).items():
            if name in tensors:
                raise ValueError(f"{path}: the tensor {name} is in {places[name]}, too")
            tensors[name], places[name] = tensor, path.name
    for name, file in listed.items():
        if places.get(name) != file:
            raise ValueError(
                f"{INDEX} lists the tensor {name}, but {file} does not have it: copy or download both files again"
            )
    return tensors


def read_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; raise ValueError if it is missing or no well-formed safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = repr(str(error)[:200])
        raise ValueError(f"{path} is missing or no complete safetensors file ({reason}): copy or download it") from None
    if strange := [name for name in tensors if not name.isprintable()]:
        raise ValueError(f"{path}: {reprlib.repr(strange[0])} is not a valid name of a tensor")
    return tensors


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.stat().st_size > JSON_LIMIT:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: refused, the limit is {JSON_LIMIT}")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no valid JSON ({str(error)[:80] or 'nested too deeply'})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object is expected, not a {type(value).__name__}")
    return value
