"""Save and load checkpoints of a trial: atomic, checksummed, without pickle.

    FOLDER/step-00001234/tensors.safetensors      every tensor
    FOLDER/step-00001234/state.json               all other values, and SHA-256 sums of both files

If there are several ranks, each writes its own file: tensors-00000-of-00002.safetensors and so on
(distributed/sharding.py). state.json then contains the SHA-256 of each file, and the names of the split tensors. Each
file has some rows of a split tensor. Any other tensor in a rank's file is that rank's own value; a tensor that is only
in the first file is the value of all ranks.

A checkpoint is written under a temporary name, flushed to the disk and renamed, so after any failure it is either
complete or missing. Then older checkpoints are removed, and those of later steps, because training has started again
before them. `newest` verifies the checkpoint that it returns; it skips damaged ones with a warning. Only one process at
a time may write to a folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from fewbits.common.atomic import folder_atomically, remove_folder, remove_leftovers, synced_file

FORMAT, SHARDED = 1, 2  # `format` in state.json: one file of tensors, or one file for each rank
TENSORS, STATE = "tensors.safetensors", "state.json"

_NAME = re.compile(r"step-(\d{8,})")


class DamagedCheckpoint(ValueError):
    """Raised for a checkpoint with a missing or damaged file; the message names the file and the damage."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been verified. Its tensors are read when `tensors` is called."""

    path: Path
    step: int
    state: dict[str, Any]  # the JSON that `flatten` returned
    files: tuple[str, ...] = (TENSORS,)  # the names of the files of tensors, by rank
    split: frozenset[str] = frozenset()  # the names of the tensors whose rows are split over the files

    def tensors(
        self, device: str | torch.device = "cpu", *, under: str = "", part: tuple[int, int] = (0, 1)
    ) -> dict[str, Tensor]:
        """Return the tensors whose names begin with `under`, by name; `model.`, for example, skips optimizer states.

        part: (the rank that reads, the number of ranks). A split tensor is read with only this rank's rows, any other
            with this rank's own value, or that of the first file if the number of ranks was another when it was saved.
        """
        rank, ranks = part
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(self.path / name, "pt", device=str(device))) for name in self.files]
            own = files[rank] if len(files) == ranks else files[0]
            names = [name for name in files[0].keys() if name.startswith(under)]  # noqa: SIM118
            own_names = set(own.keys())
            return {
                name: _joined(files, name, rank, ranks)
                if name in self.split
                else (own if name in own_names else files[0]).get_tensor(name)
                for name in names
            }


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write the checkpoint of a step and return its path; keep only this one and the last `keep` − 1 of earlier steps.

    tensors, state: the results of `flatten`. If writing fails, for example on a full disk, older checkpoints stay.
    """
    path = next_path(folder, step)
    with folder_atomically(path) as partial:
        size, digest = write_tensors(partial / TENSORS, tensors)
        write_state(partial, {"format": FORMAT, "step": step, "bytes": size, "sha256": digest, "state": state})
    retain(path, keep)
    return path


def next_path(folder: Path, step: int) -> Path:
    """Return the path for a new checkpoint; create `folder`, and remove incomplete checkpoints and one of this step."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    path = folder / f"step-{step:08d}"
    if path.exists():  # damaged, or training has started again before it
        remove_folder(path)
    return path


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write tensors to a new safetensors file and flush it to the disk; return its size in bytes and its SHA-256."""
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(x.dtype).removeprefix("torch."), shape=x.shape, data_ptr=x.data_ptr(), data_len=x.nbytes
        )
        for name, x in dense.items()
    }
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    try:
        serialize_file(specs, path, {"format": "pt", **(metadata or {})})
    except SafetensorError as error:
        if not (number := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        code, size = int(number[1]), sum(x.nbytes for x in dense.values())
        room = f"{path} needs {size:,} bytes, {shutil.disk_usage(path.parent).free:,} are free"
        raise OSError(code, f"checkpoint not written, {os.strerror(code)}: {room}") from error
    path.chmod(mode)  # safetensors gives its files to their owner alone
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def write_state(partial: Path, content: dict[str, Any]) -> None:
    """Write state.json with this content, and its SHA-256 as `seal`, into the checkpoint's temporary folder."""
    with synced_file(partial / STATE) as file:
        file.write(json.dumps({"seal": _seal(content), **content}, indent=1, allow_nan=False).encode())


def newest(*folders: Path) -> Checkpoint | None:
    """Return the intact checkpoint with the highest step in these folders, or None; warn about damaged ones."""
    for path in newest_first(*folders):
        try:
            return load(path)
        except DamagedCheckpoint as error:
            warnings.warn(f"damaged checkpoint skipped: {error}", stacklevel=2)
    return None


def newest_first(*folders: Path) -> list[Path]:
    """Return the paths of all checkpoints in these folders, including damaged ones; the highest step comes first."""
    return [path for _, path in sorted((entry for folder in folders for entry in steps(folder).items()), reverse=True)]


def steps(folder: Path) -> dict[int, Path]:
    """Return a dict from the step of each checkpoint in a folder to its path, including damaged ones, in order."""
    if not folder.is_dir():
        return {}
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def load(path: Path, part: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Verify the checksums of a checkpoint and return it; raise DamagedCheckpoint if a file is not what was saved.

    part: (rank, ranks), to verify only this rank's share of the files of tensors; all ranks together verify all files.
    """
    rank, ranks = part
    try:
        sealed = _unsealed(path / STATE)
        files = sealed["files"] if sealed["format"] == SHARDED else [{"name": TENSORS, **sealed}]
        for saved in files[rank::ranks]:
            tensors = path / saved["name"]
            if (size := tensors.stat().st_size) != saved["bytes"]:
                raise DamagedCheckpoint(f"{tensors} has {size:,} bytes, but {saved['bytes']:,} were saved")
            with tensors.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != saved["sha256"]:
                    raise DamagedCheckpoint(f"{tensors} is not what was saved: its SHA-256 differs")
    except OSError as error:  # a missing or unreadable file is damage, a missing permission is not
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
            raise
        raise DamagedCheckpoint(f"{error.filename or path}: {error.strerror}") from error
    names = tuple(saved["name"] for saved in files)
    return Checkpoint(path, sealed["step"], sealed["state"], names, frozenset(sealed.get("split", ())))


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Split nested dicts and lists into named tensors and plain JSON that refers to the tensors by name.

    A name is the path to the tensor, such as `optimizer.w.exp_avg`. A tensor that occurs twice (a tied embedding) gets
    one name, and `unflatten` restores one tensor.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def tensor_name(tensor: Tensor, path: str) -> str:
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and same in names:
            return names[same]
        while path in tensors:  # the paths of two tensors can be equal: {"a.b": x, "a": {"b": y}}
            path += "'"
        tensors[path] = tensor.detach()
        return names.setdefault(same, path) if tensor.numel() else path

    def walk(node: Any, path: str) -> Any:
        inside = f"{path}." if path else ""
        if isinstance(node, Tensor):
            return {"$tensor": tensor_name(node, path)}
        if isinstance(node, Mapping):
            return {key: walk(value, f"{inside}{key}") for key, value in node.items()}
        if isinstance(node, list):
            return [walk(item, f"{inside}{index}") for index, item in enumerate(node)]
        if isinstance(node, float) and not math.isfinite(node):
            return {"$float": str(node)}
        return node

    return tensors, walk(tree, "")


def unflatten(tensors: Mapping[str, Tensor], state: Any) -> Any:
    """Return the nested state from the tensors and the JSON that `flatten` returned."""
    if isinstance(state, list):
        return [unflatten(tensors, item) for item in state]
    if not isinstance(state, Mapping):
        return state
    match [*state.items()]:
        case [("$tensor", name)]:
            return tensors[name]
        case [("$float", text)]:
            return float(text)
    return {key: unflatten(tensors, value) for key, value in state.items()}


def _joined(files: list[Any], name: str, rank: int, ranks: int) -> Tensor:
    """Return the rows of the split tensor `name` that belong to a rank; `files` may be those of more or fewer ranks."""
    slices = [file.get_slice(name) for file in files]
    counts = [rows.get_shape()[0] for rows in slices]
    chunk = -(-sum(counts) // ranks)
    first, last = rank * chunk, min((rank + 1) * chunk, sum(counts))
    parts, at = [], 0
    for rows, count in zip(slices, counts, strict=True):
        if max(first, at) < min(last, at + count):
            parts.append(rows[max(first - at, 0) : min(last - at, count)])
        at += count
    return torch.cat(parts) if parts else slices[0][:0]


def retain(newest: Path, keep: int) -> None:
    """Remove all checkpoints except `newest`, which was just saved, and the last `keep` − 1 of earlier steps."""
    others = {step: path for step, path in steps(newest.parent).items() if path != newest}
    own = int(newest.name.removeprefix("step-"))
    older, later = ([s for s in others if s < own], [s for s in others if s > own])
    for step in later + older[: max(len(older) - (keep - 1), 0)]:
        remove_folder(others[step])


def _unsealed(path: Path) -> dict[str, Any]:
    """Return the content of a state.json; raise DamagedCheckpoint if its `seal` is not the SHA-256 of the rest."""
    try:
        content = json.loads(path.read_bytes())
        intact = content.pop("seal") == _seal(content)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not what was saved: {error!r}") from error
    if not intact:
        raise DamagedCheckpoint(f"{path} is not what was saved: its SHA-256 differs")
    if content["format"] not in (FORMAT, SHARDED):
        raise DamagedCheckpoint(
            f"{path} has format {content['format']}, but this version of fewbits reads {FORMAT} and {SHARDED}"
        )
    return content


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
