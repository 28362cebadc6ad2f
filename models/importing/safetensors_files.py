"""Read the tensors of a folder with safetensors: one model.safetensors, or several files that an index lists."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
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
    try:
        listed = json.loads(path.read_text("utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        listed = None
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{path} is not an index of safetensors: it has no weight_map from tensor names to file names")
    return listed


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
    except FileNotFoundError:
        raise ValueError(
            f"{shard} does not exist, but the index beside it lists it: copy or download it, too"
        ) from None
    except SafetensorError as error:
        raise ValueError(f"{shard} is not a complete safetensors file ({error}): copy or download it again") from None
