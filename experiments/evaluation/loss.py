"""Evaluate the loss of held-out windows and of texts: the mean cross entropy in nats per token.

The windows are the same for every trial, so two trials can be compared window by window; the mean of these paired
differences has far less noise than a difference of losses on different windows. Sums are exact (math.fsum rounds once),
so they depend neither on the order nor on the batch size. But the model's own arithmetic depends on the batch size: if
a whole tensor has one scale, all windows of a batch share it. So compare only losses that were computed with the same
batch size.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor, nn


class Model(Protocol):
    """A language model: an nn.Module whose forward gives logits[B, T, V] for tokens[B, T]."""

    def __call__(self, tokens: Tensor, /) -> Tensor: ...

    def loss(self, tokens: Tensor, targets: Tensor, /, reduction: Literal["mean", "none"] = "mean") -> Tensor:
        """Return the cross entropy in nats: the mean over all targets, or with reduction="none" that of each target."""

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Tokenizer(Protocol):
    """A tokenizer that turns text into tokens and back."""

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, tokens: Sequence[int], /) -> str: ...


class Corpus(Protocol):
    """A corpus whose splits can be read as windows of equal length."""

    def windows(self, split: str, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of `count` windows of a split, int64 [count, length].

        The target of an input token is the next token of the split. Equal arguments always give the same windows.
        """


@contextmanager
def evaluating(model: Model) -> Iterator[torch.device]:
    """Disable gradients and set every module to evaluation mode for the `with` block; yield the model's device.

    The modules' modes are restored afterwards. Quantizers stay active: the model is evaluated with its recipe.
    """
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        for module, mode in modes:
            module.training = mode


def check_count(name: str, value: int) -> None:
    """Raise ValueError, with the argument's name in the message, if `value` is not an integer of 1 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: an integer of 1 or more is expected")


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


def text_windows(tokens: Sequence[int], separator: int | None, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets, and a mask of the targets that count, each [windows, length].

    The text is cut into consecutive windows. If the last window, which ends at the end of the text, overlaps the window
    before it, its targets in the overlap do not count. A text of fewer than `length` tokens is one shorter window.
    separator: the token that precedes a text in training; None: the text's first token is not predicted.
    """
    text = torch.tensor(tokens if separator is None else [separator, *tokens], dtype=torch.int64)
    count = len(text) - 1
    if count < 1:
        raise ValueError("a text to evaluate (option --text) has no token to predict; use a longer text")
    length = min(length, count)
    starts = torch.arange(0, count - length + 1, length)
    if rest := count % length:
        starts = torch.cat((starts, torch.tensor([count - length])))
    places = starts[:, None] + torch.arange(length)
    counts = torch.ones_like(places, dtype=torch.bool)
    if rest:
        counts[-1, : length - rest] = False
    return text[places], text[places + 1], counts


def text_loss(model: Model, windows: tuple[Tensor, Tensor, Tensor], batch: int) -> float:
    """Return the mean loss of a text in nats per token.

    windows: the result of `text_windows`. batch: windows per forward pass.
    """
    inputs, targets, counts = windows
    losses = torch.tensor([row for rows in token_losses(model, inputs, targets, batch) for row in rows])
    return math.fsum(losses[counts].tolist()) / int(counts.sum())
