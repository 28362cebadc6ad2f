"""Evaluate held-out loss: the mean cross entropy in nats per token, of each window and of all windows.

The windows are the same for every trial, so two trials are compared window by window: the difference of two vectors
has far less noise than the difference of two means. Sums are exact (math.fsum rounds once), so they depend neither on
the order nor on the batch size. The model's own arithmetic does depend on the batch size: a scale shared by a whole
tensor is shared by the windows of a batch. Compare only losses that were computed with one batch size.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fewbits.experiments.evaluation.protocols import Corpus, Model, check_count, evaluating


def window_count(split: str, windows: int, ood_windows: int | None) -> int:
    """Return how many windows of a split are evaluated; out-of-domain text may have its own number."""
    return ood_windows if split == "ood" and ood_windows is not None else windows


def evaluate_loss(model: Model, corpus: Corpus, split: str, *, windows: int, length: int, batch: int) -> float:
    """Return the mean loss in nats per token over `windows` windows of a split."""
    return mean_loss(evaluate_windows(model, corpus, split, windows=windows, length=length, batch=batch))


def evaluate_windows(model: Model, corpus: Corpus, split: str, *, windows: int, length: int, batch: int) -> Tensor:
    """Return the mean loss of each window, float64 [windows], for paired comparisons."""
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
    """Yield the loss of each token of each window, batch by batch."""
    with evaluating(model) as device:
        for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
            losses = model.loss(x.to(device), y.to(device), reduction="none").reshape(x.shape)
            yield losses.double().tolist()


def mean_loss(each: Tensor) -> float:
    """Return the mean of the windows' losses; all windows have the same length."""
    return math.fsum(each.tolist()) / each.numel()
