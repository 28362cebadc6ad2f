"""Define the cross entropy of rows of logits and its gradient, in FP32; sums.py defines the order of sums."""

import torch
from torch import Tensor

from fewbits.kernels.reference.functions import exponential
from fewbits.kernels.reference.sums import along_rows


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Return −log softmax(logits)[target] and log Σ e^logits of each row; both are 0 if the target is `ignored`."""
    x, counted = logits.float(), targets != ignored
    top = x.amax(-1)
    logarithm = along_rows(exponential(x - top[:, None])).double().log()
    right = x.gather(-1, targets.where(counted, 0)[:, None])[:, 0]
    losses = (top.double() - right.double() + logarithm).float()
    log_sums = (top.double() + logarithm).float()
    return losses.where(counted, 0.0), log_sums.where(counted, 0.0)


def cross_entropy_backward(logits: Tensor, targets: Tensor, log_sums: Tensor, grad: Tensor, ignored: int) -> Tensor:
    """Return (softmax(logits) − one hot)·grad of each row, 0 for rows whose target is `ignored`.

    log_sums: the second result of `cross_entropy`. grad: the gradient of the first result, one number for each row.
    """
    counted = targets != ignored
    columns = targets.where(counted, 0)[:, None]
    p = exponential(logits.float() - log_sums[:, None])
    p = p.scatter(-1, columns, p.gather(-1, columns) - 1.0) * grad[:, None]
    return p.to(logits.dtype).where(counted[:, None], torch.zeros((), dtype=logits.dtype))
