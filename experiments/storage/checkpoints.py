"""Save and load checkpoints of a trial: atomic, checksummed, without pickle.

    FOLDER/step-00001234/tensors.safetensors      every tensor
    FOLDER/step-00001234/state.json               everything else, the SHA-256 of the tensors and its own

Several ranks write a file each, tensors-00000-of-00002.safetensors and so on (fewbits.experiments.distributed.saving).
state.json then has the SHA-256 of each file, and the names of the tensors that are split: these consist of the rows in
all files. Other tensors belong to the rank whose file has them; those that only the first file has, to all ranks.

A checkpoint is written under a temporary name, flushed to the disk and renamed into place. So after any failure it is
either complete or missing, and the older ones stay until it is complete. `newest` checks every checkpoint that it
returns; it skips a damaged one with a warning, so that the steps since the one before it have to be trained again.
Saving step N makes N the newest: checkpoints of later steps belong to an abandoned continuation and are removed. A
folder has one writer at a time.

`flatten` splits any nesting of dicts, lists and tuples (a model's or optimizer's state_dict, states of random
generators, a position in the data) into named tensors and JSON, and `unflatten` restores exactly the same nesting.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from fewbits.common.atomic import folder_atomically, remove_folder, remove_leftovers, synced_file

FORMAT, SHARDED = 1, 2  # one file of tensors, and one for each rank
TENSORS, STATE = "tensors.safetensors", "state.json"

# If a damaged or foreign checkpoint of the same step exists, the step is saved as a second edition, step-00001234.2.
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_CHUNK = 32 << 20
_SMALL = 1 << 20  # hashed in the same thread: passing it to another thread costs more
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class DamagedCheckpoint(ValueError):
    """An error that names the damaged file of a checkpoint, and how it is damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are intact. Its tensors are read on request."""

    path: Path
    step: int
    state: dict[str, Any]
    files: tuple[str, ...] = (TENSORS,)
    split: frozenset[str] = frozenset()

    def tensors(
        self, device: str | torch.device = "cpu", *, under: str = "", part: tuple[int, int] = (0, 1)
    ) -> dict[str, Tensor]:
        """Return the tensors whose names begin with `under`; for example `model.` skips the optimizer's.

        part: (rank, ranks). Of a split tensor, only this rank's rows are read; of other tensors, this rank's own one.
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
    """Write the checkpoint of a step, then remove all but the newest `keep`; return its path.

    `state` is plain JSON, as from `flatten`. A tensor is copied as a whole only if it is not contiguous. If
    several names refer to one tensor, it is saved for each of them; `flatten` gives such a tensor one name. If writing
    fails, for example on a full disk, OSError states the bytes needed and free; the partial checkpoint is removed, and
    the older ones stay.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step={step}, keep={keep}: step has to be 0 or more, and keep 1 or more")
    layout, size = _layout(tensors)
    _check_json(state)
    path = next_path(folder, step)
    try:
        with folder_atomically(path) as partial:
            with synced_file(partial / TENSORS) as file:
                digest = _write(file, layout)
            write_state(partial, {"format": FORMAT, "step": step, "bytes": size, "sha256": digest, "state": state})
    except OSError as error:
        raise lacking(error, path, size) from error
    retain(path, keep)
    return path


def next_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step will be, in a folder that is created and cleared of partial ones."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    edition = max((edition for (at, edition), _ in _list(folder) if at == step), default=0) + 1
    return folder / (f"step-{step:08d}" + (f".{edition}" if edition > 1 else ""))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a file of tensors; return its bytes and its SHA-256."""
    layout, size = _layout(tensors)
    try:
        with synced_file(path) as file:
            return size, _write(file, layout)
    except OSError as error:
        raise lacking(error, path, size) from error


def write_state(partial: Path, content: dict[str, Any]) -> None:
    """Write the state of a checkpoint that is not complete yet."""
    _check_json(content["state"])
    with synced_file(partial / STATE) as file:
        file.write(_sealed(content))


def lacking(error: OSError, path: Path, size: int) -> OSError:
    """Return a copy of the error whose message says how many bytes the file needs and how many are free."""
    free = shutil.disk_usage(path.parent).free
    reason = f"checkpoint not written, {error.strerror}: {path} needs {size:,} bytes, {free:,} are free"
    return OSError(error.errno, reason)


def newest(*folders: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint of all folders, or None; warn about each damaged one that is skipped."""
    for path in newest_first(*folders):
        try:
            return load(path)
        except DamagedCheckpoint as error:
            warnings.warn(f"damaged checkpoint skipped: {error}", stacklevel=2)
    return None


def newest_first(*folders: Path) -> list[Path]:
    """Return the paths of the checkpoints of all folders, damaged ones included."""
    return [path for _, path in sorted((entry for folder in folders for entry in _list(folder)), reverse=True)]


def steps(folder: Path) -> dict[int, Path]:
    """Return the paths of a folder's checkpoints by step, damaged ones included."""
    return {step: path for (step, _), path in _list(folder)}


def load(path: Path, part: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Return a checkpoint after checking all its bytes; raise DamagedCheckpoint if they differ from what was saved.

    part: (rank, ranks), to check only this rank's share of the files; together the ranks check all.
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
    except OSError as error:  # a missing or unreadable file is damage, a lack of permission is not
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
            raise
        raise DamagedCheckpoint(f"{error.filename or path}: {error.strerror}") from error
    names = tuple(saved["name"] for saved in files)
    return Checkpoint(path, sealed["step"], sealed["state"], names, frozenset(sealed.get("split", ())))


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Return named tensors, and JSON that refers to them. Raise TypeError for any other kind of value.

    A name is the path to the tensor, such as `optimizer.w.exp_avg`. A tensor that occurs twice (a tied embedding) is
    stored once and restored as one; views that share only some memory are restored separately. Every kind of dict is
    restored as dict.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def tensor_name(tensor: Tensor, path: str) -> str:
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and same in names:
            return names[same]
        while path in tensors:  # the key "a.b" and the key "b" within "a" give the same path
            path += "'"
        tensors[path] = tensor.detach()
        return names.setdefault(same, path) if tensor.numel() else path

    def walk(node: Any, path: str) -> Any:
        if node is None or type(node) in (bool, int, str):
            return node
        if type(node) is float:
            return node if math.isfinite(node) else {"$float": str(node)}
        if isinstance(node, Tensor):
            return {"$tensor": tensor_name(node, path)}
        inside = f"{path}." if path else ""
        if type(node) in (list, tuple):
            items = [walk(item, f"{inside}{index}") for index, item in enumerate(node)]
            return items if type(node) is list else {"$tuple": items}
        if isinstance(node, dict):
            if all(type(key) is str and not key.startswith("$") for key in node):
                return {key: walk(value, f"{inside}{key}") for key, value in node.items()}
            return {"$dict": [[walk(key, path), walk(value, f"{inside}{key}")] for key, value in node.items()]}
        raise TypeError(
            f"{path or 'the state'} is a {type(node).__qualname__}: "
            "valid types are None, bool, int, float, str, tensors, and lists, tuples and dicts of these"
        )

    return tensors, walk(tree, "")


def unflatten(tensors: Mapping[str, Tensor], state: Any) -> Any:
    """Return the nested state that `flatten` split into tensors and JSON."""
    if isinstance(state, list):
        return [unflatten(tensors, item) for item in state]
    if not isinstance(state, Mapping):
        return state
    match [*state.items()]:
        case [("$tensor", name)]:
            return tensors[name]
        case [("$float", text)]:
            return float(text)
        case [("$tuple", items)]:
            return tuple(unflatten(tensors, item) for item in items)
        case [("$dict", items)]:
            return {unflatten(tensors, key): unflatten(tensors, value) for key, value in items}
    return {key: unflatten(tensors, value) for key, value in state.items()}


def _list(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """Return ((step, edition), path) of a folder's checkpoints, damaged ones included, oldest first."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), int(match[2] or 1)), path) for match, path in matches if match)


def _joined(files: list[Any], name: str, rank: int, ranks: int) -> Tensor:
    """Return the rows of a split tensor that one of `ranks` ranks holds, from the files that contain them."""
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
    """Remove checkpoints of later steps, other copies of this step, and older checkpoints beyond the number to keep."""
    ((step, edition),) = [entry for entry, path in _list(newest.parent) if path == newest]
    others = [(at, path) for (at, number), path in _list(newest.parent) if (at, number) != (step, edition)]
    older = [path for at, path in others if at < step]
    later = [path for at, path in others if at >= step]
    for path in later + older[: max(len(older) - (keep - 1), 0)]:
        remove_folder(path)


def _layout(tensors: Mapping[str, Tensor]) -> tuple[list[bytes | Tensor], int]:
    """Return the parts of a safetensors file in order, its header first, and the file's size.

    Tensors with wide elements come first, so that all are aligned without gaps.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            kind = f"{tensor.dtype} tensor, {tensor.layout}, on {tensor.device}"
            raise ValueError(f"{name} is a {kind}: only dense tensors can be saved, of {', '.join(map(str, _DTYPES))}")
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if clash := entries.keys() & tensors.keys():
        raise ValueError(f"no tensor may be named {clash.pop()}: safetensors reserves this name")
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    at = 0
    for name, tensor in ordered:
        end = at + tensor.numel() * tensor.itemsize
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *(tensor for _, tensor in ordered)], 8 + len(text) + at


def _write(file: BinaryIO, layout: list[bytes | Tensor]) -> str:
    """Write all parts; return the whole file's SHA-256. A second thread hashes each chunk while it is written."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as pool:
        hashed = pool.submit(digest.update, b"")
        for chunk in _chunks(layout):
            hashed.result()
            if len(chunk) < _SMALL:
                digest.update(chunk)
            else:
                hashed = pool.submit(digest.update, chunk)
            file.write(chunk)
        hashed.result()
    return digest.hexdigest()


def _chunks(layout: list[bytes | Tensor]) -> Iterator[Any]:
    """Yield the bytes of all parts; tensors on other devices are copied one chunk at a time."""
    for part in layout:
        if isinstance(part, bytes):
            yield part
        elif part.numel():
            flat = part.detach().contiguous().as_strided((part.numel(),), (1,))
            for chunk in flat.view(torch.uint8).split(_CHUNK):
                yield chunk.cpu().numpy().data


def _check_json(state: Mapping[str, Any]) -> None:
    """Raise ValueError for values that JSON would change or cannot represent: tuples, other keys than strings, NaN."""
    try:
        same = json.loads(json.dumps(state, allow_nan=False)) == state
    except (TypeError, ValueError) as error:
        raise ValueError(f"state is not plain JSON, flatten it first: {error}") from error
    if not same:
        raise ValueError("state is not plain JSON, flatten it first: tuples and keys other than strings would change")


def _sealed(content: dict[str, Any]) -> bytes:
    return json.dumps({"seal": _seal(content), **content}, indent=1, allow_nan=False).encode()


def _unsealed(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        intact = content.pop("seal") == _seal(content)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not what was saved: {error!r}") from error
    if not intact:
        raise DamagedCheckpoint(f"{path} is not what was saved: its SHA-256 differs")
    if content["format"] not in (FORMAT, SHARDED):
        raise DamagedCheckpoint(f"{path} has format {content['format']}, but this version reads {FORMAT} and {SHARDED}")
    return content


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
