"""Compute products of BF16 values in the orders that arithmetic.md defines, to compare backends bit for bit."""

from collections.abc import Callable

import torch
from torch import Tensor


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    total = _nothing(a, b)
    for k in range(a.shape[-1]):
        total = _added(total, a, b, k)
    return total


def pairs(a: Tensor, b: Tensor) -> Tensor:
    total = _nothing(a, b)
    for first in range(0, a.shape[-1], 2):
        for k in range(min(first + 1, a.shape[-1] - 1), first - 1, -1):
            total = _added(total, a, b, k)
    return total


def tiles(a: Tensor, b: Tensor) -> Tensor:
    total = _nothing(a, b)
    for first in range(0, a.shape[-1], 32):
        even = odd = torch.zeros_like(total)
        for k in range(first, min(first + 32, a.shape[-1])):
            even, odd = (even, _added(odd, a, b, k)) if k % 2 else (_added(even, a, b, k), odd)
        total = total + (even + odd)
    return total


Order = Callable[[Tensor, Tensor], Tensor]
ORDERS: tuple[Order, ...] = (one_by_one, pairs, tiles)  # indexed by the enumeration Order of csrc/orders.h


def _nothing(a: Tensor, b: Tensor) -> Tensor:
    return torch.zeros(*a.shape[:-1], b.shape[-1])


def _added(total: Tensor, a: Tensor, b: Tensor, k: int) -> Tensor:
    """Return total + (column k of a) · (row k of b). The products are exact in float32, so each sum is rounded once."""
    return total + a[..., :, k, None].float() * b[..., k, None, :].float()
