"""Evaluate held-out loss: the mean cross entropy in nats per token, of each window and of all windows.

The windows are the same for every trial, so two trials can be compared window by window; the mean of these paired
differences has far less noise than a difference of losses on different windows. Sums are exact (math.fsum rounds once),
so they depend neither on the order nor on the batch size. But the model's own arithmetic depends on the batch size: if
a whole tensor has one scale, all windows of a batch share it. So compare only losses that were computed with the same
batch size.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fewbits.experiments.evaluation.protocols import Corpus, Model, check_count, evaluating


def window_count(split: str, windows: int, ood_windows: int | None) -> int:
    """Return the number of windows to evaluate in a split.

    ood_windows: the number for the split `ood` (out-of-domain text); None: `windows`, as for every other split.
    """
    return ood_windows if split == "ood" and ood_windows is not None else windows


def evaluate_loss(model: Model, corpus: Corpus, split: str, *, windows: int, length: int, batch: int) -> float:
    """Return the mean loss in nats per token over `windows` windows of a split, `batch` windows per forward pass."""
    return mean_loss(evaluate_windows(model, corpus, split, windows=windows, length=length, batch=batch))


def evaluate_windows(model: Model, corpus: Corpus, split: str, *, windows: int, length: int, batch: int) -> Tensor:
    """Return the mean loss of each window in nats per token, float64 [windows], for paired comparisons.

    windows: how many windows of the split are read. length: tokens per window. batch: windows per forward pass.
    """
    for name, value in (("windows", windows), ("length", length), ("batch", batch)):
        check_count(name, value)
    inputs, targets = corpus.windows(split, windows, length)
    if inputs.shape != (windows, length) or targets.shape != (windows, length):
        shapes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
        raise ValueError(
            f"split {split!r}: inputs and targets have the shapes {shapes}; ({windows}, {length}) is expected"
        )
    means = [math.fsum(row) / length for losses in token_losses(model, inputs, targets, batch) for row in losses]
    return torch.tensor(means, dtype=torch.float64)


def token_losses(model: Model, inputs: Tensor, targets: Tensor, batch: int) -> Iterator[list[list[float]]]:
    """Yield, for each forward pass, a nested list [windows of this pass][length] with each token's loss in nats.

    inputs, targets: the tokens of all windows, [windows, length]. batch: windows per forward pass.
    """
    with evaluating(model) as device:
        for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
            losses = model.loss(x.to(device), y.to(device), reduction="none").reshape(x.shape)
            yield losses.double().tolist()


def mean_loss(each: Tensor) -> float:
    """Return the mean of `each`, the mean losses of windows of equal length."""
    return math.fsum(each.tolist()) / each.numel()
