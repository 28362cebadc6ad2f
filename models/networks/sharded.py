"""Read and write tensors that torch's `fully_shard` has sharded, so that this process has only some of the rows.

A sharded tensor (a DTensor) is split along its first dimension: with R ranks, rank r has the r-th of R chunks of
ceil(rows / R) rows, and the last ranks may have fewer rows or none. The functions also accept ordinary tensors, so that
their callers need not know whether a model is sharded. DTensors are recognised by their method `full_tensor`, because
importing the class DTensor is slow.
"""

from typing import Any

import torch
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """Return all rows of a tensor. For a sharded tensor, all ranks must call this, in the same order of tensors."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local(x: Tensor) -> Tensor:
    """Return the rows of a tensor that this process has, without copying; for an ordinary tensor, all rows."""
    return x.to_local() if hasattr(x, "to_local") else x


def local_rows(x: Any) -> tuple[int, int]:
    """Return (first, end): this process has the rows first ≤ row < end of the tensor."""
    if not is_sharded(x):
        return 0, len(x)
    chunk = -(-x.shape[0] // x.device_mesh.size())
    first = min(x.device_mesh.get_local_rank() * chunk, x.shape[0])
    return first, min(first + chunk, x.shape[0])


@torch.no_grad()
def fill(x: Tensor, values: Tensor) -> None:
    """Copy `values` into the tensor x. values: all rows of x, or only the rows of x that this process has."""
    own = local(x)
    if is_sharded(x) and values.shape == x.shape:
        values = values[slice(*local_rows(x))]
    if values.shape != own.shape:
        raise ValueError(
            f"values of shape {tuple(values.shape)} do not fit a tensor of shape {tuple(x.shape)}: both shapes must be "
            "equal"
        )
    own.copy_(values)


def copy_like(values: Tensor, x: Tensor) -> Tensor:
    """Return a copy of `values`.

    If x is sharded, and `values` has the shape of x or of this process's rows of x, the copy is sharded like x.
    """
    if not is_sharded(x) or values.shape not in (x.shape, local(x).shape):
        return values.clone()
    copy = torch.zeros_like(x.detach(), dtype=values.dtype)
    fill(copy, values)
    return copy
