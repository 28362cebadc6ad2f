"""Declare what evaluation needs from a model, a tokenizer and a corpus, and put a model into evaluation mode."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import numpy as np
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
    """A corpus whose splits can be read as windows of equal length or as documents."""

    def windows(self, split: str, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of `count` windows of a split, int64 [count, length].

        The target of an input token is the next token of the split. Equal arguments always give the same windows.
        """

    def documents(self, split: str) -> Iterator[np.ndarray[Any, Any]]:
        """Yield the split's documents in order, each as a vector of tokens."""


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
