"""Save a trial of several ranks: each rank writes its shards, and rank 0 completes the checkpoint.

Every rank writes one safetensors file into a folder with a temporary name, and sends the file's size and SHA-256 to
rank 0, which writes these into the state file and renames the folder. If one rank fails, all ranks raise an error, and
the older checkpoints stay. `fewbits.experiments.storage.checkpoints` describes the format.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fewbits.common.atomic import folder_atomically
from fewbits.experiments.devices import World
from fewbits.experiments.storage import checkpoints
from fewbits.models.networks.sharded import is_sharded, local

_NAME = 255  # largest number of bytes in a file's name
_SHA256 = 32  # number of bytes of a digest
OF_RANK = ("observer.", "rng")  # beginnings of the names of tensors that are different on every rank


def local_tree(tree: Any, addresses: set[int]) -> Any:
    """Return a copy of the nested dictionaries `tree` in which this rank's rows replace each sharded tensor.

    Add the memory addresses of these rows to `addresses`.
    """
    if isinstance(tree, Mapping):
        return {key: local_tree(value, addresses) for key, value in tree.items()}
    if isinstance(tree, Tensor) and is_sharded(tree):
        rows = local(tree.detach())
        if rows.numel():
            addresses.add(rows.data_ptr())
        return rows
    return tree


def save(folder: Path, step: int, tree: Mapping[str, Any], world: World, *, keep: int) -> None:
    """Save a checkpoint of `tree` in `folder`, and keep the newest `keep` there. All ranks must call this together."""
    if world.ranks == 1:
        tensors, rest = checkpoints.flatten(tree)
        checkpoints.save(folder, step, tensors, rest, keep=keep)
        return
    addresses: set[int] = set()
    tensors, rest = checkpoints.flatten(local_tree(tree, addresses))
    split = sorted(name for name, tensor in tensors.items() if tensor.data_ptr() in addresses)
    if world.rank:
        tensors = {name: x for name, x in tensors.items() if name in split or name.startswith(OF_RANK) or not x.numel()}
    failure: OSError | None = None
    with ExitStack() as stack:
        path, partial = folder, None
        if not world.rank:
            try:
                path = checkpoints.next_path(folder, step)
                partial = stack.enter_context(folder_atomically(path))
            except OSError as error:
                failure = error
        size, digest = 0, bytes(_SHA256).hex()
        if name := _from_first(partial.name if partial else "", world):
            try:
                size, digest = checkpoints.write_tensors(folder / name / file_name(world.rank, world.ranks), tensors)
            except OSError as error:
                failure = error
        _fail_together(failure, world)
        files = [
            {"name": file_name(rank, world.ranks), "bytes": size, "sha256": digest}
            for rank, (size, digest) in enumerate(_gather(size, digest, world))
        ]
        if partial is not None:
            content = {"format": checkpoints.SHARDED, "step": step, "files": files, "split": split, "state": rest}
            try:
                checkpoints.write_state(partial, content)
                stack.close()  # renames the folder
                checkpoints.retain(path, keep)
            except OSError as error:
                failure = error
        _fail_together(failure, world)


def newest(world: World, *folders: Path) -> checkpoints.Checkpoint | None:
    """Return the newest checkpoint in the folders that is intact on all ranks, or None; all ranks must call this."""
    if world.ranks == 1:
        return checkpoints.newest(*folders)
    for path in checkpoints.newest_first(*folders):
        checkpoint, complaint = None, None
        try:
            checkpoint = checkpoints.load(path, (world.rank, world.ranks))
        except checkpoints.DamagedCheckpoint as error:
            complaint = error
            warnings.warn(f"damaged checkpoint skipped: {error}", stacklevel=2)
        (damaged,) = world.agree(complaint is not None)
        if not damaged:
            return checkpoint
    return None


def file_name(rank: int, ranks: int) -> str:
    return f"tensors-{rank:05d}-of-{ranks:05d}.safetensors"


def _fail_together(failure: OSError | None, world: World) -> None:
    (failed,) = world.agree(failure is not None)
    if failed:
        raise failure or OSError(errno.EIO, "checkpoint not written: another rank could not write its part")


def _from_first(text: str, world: World) -> str:
    """Return rank 0's `text` on all ranks."""
    encoded = text.encode().ljust(_NAME, b"\0") if not world.rank else bytes(_NAME)
    letters = torch.tensor(list(encoded), dtype=torch.uint8, device=world.device)
    dist.broadcast(letters, 0)
    return bytes(letters.tolist()).rstrip(b"\0").decode()


def _gather(size: int, digest: str, world: World) -> Iterable[tuple[int, str]]:
    """Return the size and the SHA-256 of each rank's file, on all ranks, in the order of ranks."""
    own = torch.tensor([size, *bytes.fromhex(digest)], dtype=torch.int64, device=world.device)
    rows = [torch.empty_like(own) for _ in range(world.ranks)]
    dist.all_gather(rows, own)
    return [(int(values[0]), bytes(values[1:]).hex()) for values in (row.tolist() for row in rows)]
