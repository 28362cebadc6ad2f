"""Read and write tensors of which this process holds only some rows, as torch's `fully_shard` leaves them.

A sharded tensor (a DTensor) is split along its first dimension: with R ranks, rank r has the r-th of R chunks of
ceil(rows / R) rows, and the last ranks may have fewer or none. The functions accept ordinary tensors too, so that code
need not know whether a model is sharded. DTensors are recognised by their method, because importing their module is
slow.
"""

from typing import Any

import torch
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """Return all rows of a tensor. If it is sharded, all ranks must call this, for the same tensors in one order."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local(x: Tensor) -> Tensor:
    """Return the rows that this process holds; they share the tensor's memory."""
    return x.to_local() if hasattr(x, "to_local") else x


def local_rows(x: Any) -> tuple[int, int]:
    """Return the first row that this process holds of a tensor, and the row after the last."""
    if not is_sharded(x):
        return 0, len(x)
    chunk = -(-x.shape[0] // x.device_mesh.size())
    first = min(x.device_mesh.get_local_rank() * chunk, x.shape[0])
    return first, min(first + chunk, x.shape[0])


@torch.no_grad()
def fill(x: Tensor, values: Tensor) -> None:
    """Copy into a tensor. values: all its rows, or only those that this process holds."""
    own = local(x)
    if is_sharded(x) and values.shape == x.shape:
        values = values[slice(*local_rows(x))]
    if values.shape != own.shape:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} cannot be filled from one of {tuple(values.shape)}")
    own.copy_(values)


def copy_like(values: Tensor, x: Tensor) -> Tensor:
    """Return a copy of `values`, sharded as x is if x is sharded and `values` has x's rows (see `fill`)."""
    if not is_sharded(x) or values.shape not in (x.shape, local(x).shape):
        return values.clone()
    copy = torch.zeros_like(x.detach(), dtype=values.dtype)
    fill(copy, values)
    return copy
