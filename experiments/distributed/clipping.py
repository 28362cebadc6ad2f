"""Clip sharded gradients by their global norm.

Each rank sums the squares of its own part of the gradients in FP64, and these sums are added over all ranks. The norm
is then rounded to FP32, so it is almost always the same for any way of sharding.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from fewbits.models.networks.sharded import local


def clip_sharded(params: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their global norm is at most max_norm; return the norm that they had before.

    All ranks must call this. If max_norm is None, no gradient is scaled. Otherwise a norm of NaN makes all gradients
    NaN, and an infinite norm makes each of their elements 0 or NaN.
    """
    grads = [local(param.grad) for param in params if param.grad is not None]
    squares = [torch.linalg.vector_norm(grad, dtype=torch.float64).square() for grad in grads if grad.numel()]
    device = grads[0].device
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    norm = total.sqrt().float()
    if max_norm is not None:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
        for grad in grads:
            grad.mul_(scale)
    return norm
