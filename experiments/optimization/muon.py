"""Implement Muon (Keller Jordan, 2024) for the matrices of a model, with AdamW for all other parameters.

    b ← μ·b + (1 − μ)·g                           the momentum; g is the gradient of a matrix W
    u = (1 − μ)·g + μ·b                           Nesterov's look ahead
    O = NS₅(u / ‖u‖)                              about U·Vᵀ of the singular value decomposition u = U·S·Vᵀ, in BF16
    W ← W·(1 − lr·decay) − lr·s·O                 s: a factor that depends on the shape of W, see SCALES

NS₅ repeats X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ five times (Newton–Schulz); for a matrix with more rows than columns,
X is its transpose. The operations and their order are those of torch.optim.Muon, so the bits are the same.

The rows of a sharded parameter are divided among the ranks. Every rank gathers the directions u of as many matrices as
there are ranks, orthogonalizes one of them, and receives the others: the same bits as in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from fewbits.models.networks.partition import is_sharded, local, local_rows, whole
from fewbits.models.runtime import UntracedOptimizer

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # a, b, c of Keller Jordan's Muon
ITERATIONS = 5
LEAST_NORM = 1e-7
# The factor of the update of a matrix with this many rows and columns.
SCALES: dict[str, Callable[[int, int], float]] = {
    "match-rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),  # Moonshot's, arXiv 2502.16982
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}


class AdamW(UntracedOptimizer, torch.optim.AdamW):
    """The fused AdamW of torch, whose `step` is excluded from torch.compile."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


class Muon(AdamW):
    """Muon for the group `matrices`, AdamW for the other groups.

    matrices: the parameters of that group, each with the numbers of rows of the matrices that it consists of. A
        parameter with three dimensions counts as its matrices below each other.
    """

    def __init__(
        self,
        params: Iterable[Any],
        matrices: Mapping[Tensor, Sequence[int]],
        *,
        momentum: float,
        scale: str,
        **settings: Any,
    ) -> None:
        super().__init__(params, fused=True, **settings)
        self.matrices, self.momentum, self.scale = matrices, momentum, SCALES[scale]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["name"] != "matrices"]
        try:
            loss: float | None = unwrap(AdamW.step)(self, closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["name"] == "matrices":
                self._update(group, [param for param in group["params"] if param.grad is not None])
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        ranks = params[0].device_mesh.size() if params and is_sharded(params[0]) else 1  # type: ignore[attr-defined]
        for at in range(0, len(params), ranks):
            some = params[at : at + ranks]
            directions = [whole(self._direction(param).bfloat16()) for param in some]
            if ranks == 1:
                updates = [self._orthogonal(some[0], directions[0])]
            else:
                updates = self._divided_among_ranks(some, directions)
            for param, update in zip(some, updates, strict=True):
                param.mul_(1 - group["lr"] * group["weight_decay"])
                self._subtract(param, update, group["lr"])

    def _direction(self, param: Tensor) -> Tensor:
        """Add the gradient to the momentum, and return the direction u."""
        grad, state = param.grad, self.state[param]
        assert grad is not None
        if not state:
            state["step"], state["momentum_buffer"] = torch.zeros(()), torch.zeros_like(param)
        state["step"] += 1
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - self.momentum)
        return grad.lerp(momentum, self.momentum)

    def _orthogonal(self, param: Tensor, direction: Tensor) -> Tensor:
        """Return the updates of a parameter's matrices, below each other. direction: u of the whole parameter."""
        parts = direction.flatten(0, -2).split(list(self.matrices[param]))
        return torch.cat([orthogonalize(part) for part in parts])

    def _divided_among_ranks(self, params: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        """Return the updates of parameters of which each rank computes one. directions: u of the whole parameters."""
        import torch.distributed as dist

        rank = dist.get_rank()
        if rank < len(params):
            directions[rank] = self._orthogonal(params[rank], directions[rank])
        updates = [direction.flatten(0, -2).contiguous() for direction in directions]
        for source, update in enumerate(updates):
            dist.broadcast(update, source)
        return updates

    def _subtract(self, param: Tensor, update: Tensor, lr: float) -> None:
        """Subtract the update from the rows that this rank has. update: O of the parameter's matrices."""
        height = math.prod(param.shape[1:-1])  # rows of matrices in one row of the parameter
        first, end = (height * row for row in local_rows(param))
        own, row = local(param).view(-1, param.shape[-1]), 0
        for rows in self.matrices[param]:
            begin, stop = max(first, row), min(end, row + rows)
            if begin < stop:
                step = lr * self.scale(rows, param.shape[-1])
                own[begin - first : stop - first].add_(update[begin:stop], alpha=-step)
            row += rows


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a BF16 matrix with about the singular vectors of `matrix`, and singular values near 1."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.bfloat16, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=LEAST_NORM))
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
