"""The checkpoint store of a trial: atomic, checksummed, without pickle.

    FOLDER/step-00001234/tensors.safetensors      every tensor
    FOLDER/step-00001234/state.json               everything else, the SHA-256 of the tensors, and its own

A checkpoint is written beside its place, flushed to the disk and renamed into place: whatever happens, and whenever, it
is there whole or not at all, and those before it stay until it is. `newest` believes nothing that it has not checked; a
damaged checkpoint costs the steps since the one before it, and one warning. Saving step N makes N the newest: what
stands at later steps is a future that was given up, and goes. A folder has one writer at a time.

`flatten` splits any nesting of dicts, lists and tuples (a model's or optimizer's state_dict, states of random
generators, a data position) into named tensors and JSON, and `unflatten` puts back exactly that.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from fewbits.common.atomic import folder_atomically, remove_folder, remove_leftovers, synced_file

FORMAT = 1
TENSORS, STATE = "tensors.safetensors", "state.json"

# A step saved again beside a damaged or foreign checkpoint of the same step is its second edition, step-00001234.2.
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_CHUNK = 32 << 20
_SMALL = 1 << 20  # hashed on the spot: handing it over costs more
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
    """Says which file of which checkpoint is not what was saved, and in what way."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was found whole. Its tensors are read when asked for."""

    path: Path
    step: int
    state: dict[str, Any]

    def tensors(self, device: str | torch.device = "cpu", *, under: str = "") -> dict[str, Tensor]:
        """All of them, or those whose name begins so: `model.`, say, without the optimizer's."""
        with safe_open(self.path / TENSORS, "pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys() if name.startswith(under)}  # noqa: SIM118


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Write the checkpoint of a step, then remove all but the newest `keep`; returns where it is.

    `state` is plain JSON, as `flatten` makes it. No tensor is copied as a whole unless it is not contiguous. Names that
    share a tensor are saved once each; `flatten` gives it one name. Where there is no writing, on a full disk say, an
    OSError tells how much room it takes and how much there is; nothing of it remains, and the older ones do.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step={step}, keep={keep}: valid are a step of 0 or more, and 1 or more to keep")
    layout, size = _layout(tensors)
    _check_json(state)
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    edition = max((edition for (at, edition), _ in _found(folder) if at == step), default=0) + 1
    path = folder / (f"step-{step:08d}" + (f".{edition}" if edition > 1 else ""))
    try:
        with folder_atomically(path) as partial:
            with synced_file(partial / TENSORS) as file:
                digest = _write(file, layout)
            with synced_file(partial / STATE) as file:
                file.write(_sealed({"format": FORMAT, "step": step, "bytes": size, "sha256": digest, "state": state}))
    except OSError as error:
        free = shutil.disk_usage(folder).free
        reason = f"checkpoint not written, {error.strerror}: {path} needs {size:,} bytes, {free:,} are free"
        raise OSError(error.errno, reason) from error
    _retain(folder, step, edition, keep)
    return path


def newest(*folders: Path) -> Checkpoint | None:
    """The newest checkpoint in any of them that is whole; one warning for each damaged one passed over."""
    for _, path in sorted((found for folder in folders for found in _found(folder)), reverse=True):
        try:
            return load(path)
        except DamagedCheckpoint as error:
            warnings.warn(f"damaged checkpoint passed over: {error}", stacklevel=2)
    return None


def steps(folder: Path) -> dict[int, Path]:
    """The checkpoints that lie in a folder by step, whole or not."""
    return {step: path for (step, _), path in _found(folder)}


def load(path: Path) -> Checkpoint:
    """Check every byte of one checkpoint."""
    try:
        sealed = _unsealed(path / STATE)
        tensors = path / TENSORS
        if (size := tensors.stat().st_size) != sealed["bytes"]:
            raise DamagedCheckpoint(f"{tensors} has {size:,} bytes, {sealed['bytes']:,} were saved")
        with tensors.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sealed["sha256"]:
                raise DamagedCheckpoint(f"{tensors} is not what was saved: its SHA-256 differs")
    except OSError as error:  # a file that is missing or unreadable is damage; one that may not be read is not
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
            raise
        raise DamagedCheckpoint(f"{error.filename or path}: {error.strerror}") from error
    return Checkpoint(path, sealed["step"], sealed["state"])


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Named tensors, and JSON that refers to them. What is neither container nor tensor nor plain value is refused.

    A name is the path to the tensor, `optimizer.w.exp_avg`. A tensor met twice (a tied embedding) is kept once, and
    comes back as one; views that share only some memory come back apart. Dicts of all kinds come back as dict.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def named(tensor: Tensor, path: str) -> str:
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and same in names:
            return names[same]
        while path in tensors:  # "a.b" may be a key, and a key in a key
            path += "'"
        tensors[path] = tensor.detach()
        return names.setdefault(same, path) if tensor.numel() else path

    def walk(node: Any, path: str) -> Any:
        if node is None or type(node) in (bool, int, str):
            return node
        if type(node) is float:
            return node if math.isfinite(node) else {"$float": str(node)}
        if isinstance(node, Tensor):
            return {"$tensor": named(node, path)}
        inside = f"{path}." if path else ""
        if type(node) in (list, tuple):
            items = [walk(item, f"{inside}{index}") for index, item in enumerate(node)]
            return items if type(node) is list else {"$tuple": items}
        if isinstance(node, dict):
            if all(type(key) is str and not key.startswith("$") for key in node):
                return {key: walk(value, f"{inside}{key}") for key, value in node.items()}
            return {"$dict": [[walk(key, path), walk(value, f"{inside}{key}")] for key, value in node.items()]}
        raise TypeError(
            f"{path or 'the tree'} is a {type(node).__qualname__}: "
            "valid are None, bool, int, float, str, tensors, and lists, tuples and dicts of them"
        )

    return tensors, walk(tree, "")


def unflatten(tensors: Mapping[str, Tensor], state: Any) -> Any:
    """What `flatten` was given."""
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


def _found(folder: Path) -> list[tuple[tuple[int, int], Path]]:
    """The checkpoints of a folder, whole or not, oldest first."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(((int(match[1]), int(match[2] or 1)), path) for match, path in matches if match)


def _retain(folder: Path, step: int, edition: int, keep: int) -> None:
    others = [(at, path) for (at, found), path in _found(folder) if (at, found) != (step, edition)]
    older = [path for at, path in others if at < step]
    later = [path for at, path in others if at >= step]
    for path in later + older[: max(len(older) - (keep - 1), 0)]:
        remove_folder(path)


def _layout(tensors: Mapping[str, Tensor]) -> tuple[list[bytes | Tensor], int]:
    """The parts of a safetensors file in order, its header first, and its size. Wide elements come first, so that all
    are aligned without gaps."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            kind = f"{tensor.dtype} tensor, {tensor.layout}, on {tensor.device}"
            raise ValueError(f"{name} is a {kind}: valid are dense tensors of {', '.join(map(str, _DTYPES))}")
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if clash := entries.keys() & tensors.keys():
        raise ValueError(f"no tensor may be called {clash.pop()}: safetensors has it for itself")
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
    """Write all parts; their SHA-256. The hash runs beside the disk, one chunk behind, and costs no second reading."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as beside:
        hashed = beside.submit(digest.update, b"")
        for chunk in _chunks(layout):
            hashed.result()
            if len(chunk) < _SMALL:
                digest.update(chunk)
            else:
                hashed = beside.submit(digest.update, chunk)
            file.write(chunk)
        hashed.result()
    return digest.hexdigest()


def _chunks(layout: list[bytes | Tensor]) -> Iterator[Any]:
    """The bytes of all parts, of tensors on other devices only so much at a time."""
    for part in layout:
        if isinstance(part, bytes):
            yield part
        elif part.numel():
            flat = part.detach().contiguous().as_strided((part.numel(),), (1,))
            for chunk in flat.view(torch.uint8).split(_CHUNK):
                yield chunk.cpu().numpy().data


def _check_json(state: Mapping[str, Any]) -> None:
    """Refuse what JSON would change or cannot say: tuples, keys that are not strings, NaN."""
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
    if content["format"] != FORMAT:
        raise DamagedCheckpoint(f"{path} has format {content['format']}, this version reads {FORMAT}")
    return content


def _seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
