"""Implement Adam-mini (arXiv 2406.16793): AdamW with one second moment v per part of a tensor, not per element.

    m ← β1·m + (1 − β1)·g                     per element, as in AdamW
    v ← β2·v + (1 − β2)·mean of g² over the part
    w ← w·(1 − lr·decay) − lr/(1 − β1^t) · m / (√v / √(1 − β2^t) + ε)

A partition divides a parameter into parts; fewbits.models.networks.partition defines and returns it.

The rows of a sharded parameter are divided among the ranks (processes). Every rank stores the second moments v of all
parts; with "element", only those of its own rows. Each rank computes the means of the parts whose rows it has, and
receives the other means. If the rows of a part are on two ranks, every rank gathers the whole gradient instead. In both
cases the bits are the same as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fewbits.models.networks.partition import Partition, is_sharded, local, local_rows, whole
from fewbits.models.runtime import UntracedOptimizer


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive parts of a parameter that have equally many rows, so that one operation can update all of them."""

    rows: slice  # their rows in the parameter
    parts: slice  # their indices in v
    count: int  # the number of parts

    def view(self, x: Tensor) -> Tensor:
        """Return the rows of these parts in x (a parameter, its gradient or its m), as [parts, elements per part]."""
        return x[self.rows].view(self.count, -1)


class AdamMini(UntracedOptimizer):
    """The optimizer Adam-mini. partition: each parameter's division into parts; the other arguments are AdamW's."""

    def __init__(
        self,
        params: Iterable[Any],
        partition: Mapping[Tensor, Partition],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._runs = {p: _runs(partition[p], p.shape) for group in self.param_groups for p in group["params"]}

    def second_moment_shape(self, param: Tensor) -> tuple[int, ...]:
        """Return the shape of a parameter's second moments: [number of parts], or its own shape for "element"."""
        runs = self._runs[param]
        return tuple(param.shape) if runs is None else (runs[-1].parts.stop,)

    def is_by_element(self, param: Tensor) -> bool:
        """Tell whether every element of the parameter has its own second moment."""
        return self._runs[param] is None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter by the operations of torch's AdamW, in AdamW's order.

        With the partition "element", the result therefore has AdamW's bits.
        """
        state, runs = self.state[param], self._runs[param]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = (
                torch.zeros_like(param) if runs is None else local(param).new_zeros(self.second_moment_shape(param))
            )
        state["step"] += 1  # on the CPU, as in AdamW, so that reading it does not wait for the device
        m, v, step = state["exp_avg"], state["exp_avg_sq"], state["step"].item()
        (beta1, beta2), lr = group["betas"], group["lr"]
        step_size = lr / (1 - beta1**step)
        correction = (1 - beta2**step) ** 0.5

        param.mul_(1 - lr * group["weight_decay"])
        m.lerp_(grad, 1 - beta1)
        if runs is None:
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            param.addcdiv_(m, (v.sqrt() / correction).add_(group["eps"]), value=-step_size)
            return
        if is_sharded(param):
            v.mul_(beta2).add_(_sharded_means(grad, runs), alpha=1 - beta2)
            denominator = _by_row((v.sqrt() / correction).add_(group["eps"]), runs)[slice(*local_rows(param))]
            own, shape = local(param), (-1, *[1] * (param.ndim - 1))
            own.addcdiv_(local(m), denominator.view(shape), value=-step_size)
            return
        grad = grad.contiguous()
        for run in runs:
            part = v[run.parts].mul_(beta2).add_(run.view(grad).square().mean(1), alpha=1 - beta2)
            denominator = (part.sqrt() / correction).add_(group["eps"])
            run.view(param).addcdiv_(run.view(m), denominator[:, None], value=-step_size)


def _sharded_means(grad: Tensor, runs: tuple[_Run, ...]) -> Tensor:
    """Return the mean of g² over each part of a sharded gradient, in the order of the parts, on every rank.

    runs: all parts of the parameter, in groups of consecutive parts of equal size.
    """
    import torch.distributed as dist

    if any(_is_cut(grad, run) for run in runs):
        gathered = whole(grad).contiguous()
        return torch.cat([run.view(gathered).square().mean(1) for run in runs])
    rows, (first, last) = local(grad).contiguous(), local_rows(grad)
    means = rows.new_zeros(runs[-1].parts.stop)
    for run in runs:
        size = (run.rows.stop - run.rows.start) // run.count
        begin, end = max(first, run.rows.start), min(last, run.rows.stop)
        if begin < end:
            part = run.parts.start + (begin - run.rows.start) // size
            count = (end - begin) // size
            own = rows[begin - first : end - first].view(count, -1)
            means[part : part + count] = own.square().mean(1)
    dist.all_reduce(means)  # a sum: one rank has computed the mean of a part, and the other ranks have 0
    return means


def _is_cut(x: Tensor, run: _Run) -> bool:
    """Tell whether the rows of any of these parts of x, a sharded parameter or gradient, lie on more than one rank.

    run: consecutive parts of x that have equally many rows.
    """
    ranks = x.device_mesh.size()  # type: ignore[attr-defined]  # of a DTensor
    chunk, size = -(-x.shape[0] // ranks), (run.rows.stop - run.rows.start) // run.count
    borders = range(chunk, x.shape[0], chunk)
    return any(run.rows.start < at < run.rows.stop and (at - run.rows.start) % size for at in borders)


def _by_row(values: Tensor, runs: tuple[_Run, ...]) -> Tensor:
    """Return one value per row of the parameter: the value of the part that contains the row."""
    return torch.cat(
        [values[run.parts].repeat_interleave((run.rows.stop - run.rows.start) // run.count) for run in runs]
    )


def _runs(partition: Partition, shape: torch.Size) -> tuple[_Run, ...] | None:
    """Return groups of consecutive parts of equal size, so that one operation updates a group.

    Return None if every element is a part.
    """
    if partition == "element" or len(shape) == 0 or 0 in shape:
        return None
    sizes = (shape[0],) if partition == "tensor" else partition
    if isinstance(sizes, str) or not all(size > 0 for size in sizes) or sum(sizes) != shape[0]:
        raise ValueError(
            f"partition {partition!s:.60} of a tensor with {shape[0]} rows: valid partitions are element, tensor, or "
            f"positive numbers of rows whose sum is {shape[0]}"
        )
    runs: list[_Run] = []
    row = part = 0
    for size, same in groupby(sizes):
        count = len(list(same))
        runs.append(_Run(slice(row, row + count * size), slice(part, part + count), count))
        row, part = row + count * size, part + count
    return tuple(runs)
