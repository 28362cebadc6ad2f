"""Clip gradients of which each rank holds a part, by the norm of all of them.

Each rank adds the squares of its part in FP64, and the sums are added over ranks. So rounding to FP32, which follows,
almost always gives the same norm for any way of sharding.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from fewbits.models.networks.sharded import local


def clip_sharded(params: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale all gradients so that their common norm is at most max_norm; return the norm before.

    All ranks must call this. A norm that is not finite makes all gradients NaN, as for one process.
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
