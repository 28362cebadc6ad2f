"""What evaluation asks of a model, a tokenizer and a corpus, and the state in which a model is evaluated."""

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
        """Cross entropy in nats: one number, or one for each target."""

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Tokenizer(Protocol):
    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, tokens: Sequence[int], /) -> str: ...


class Corpus(Protocol):
    def windows(self, split: str, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [count, length]: always the same ones for the same arguments."""

    def documents(self, split: str) -> Iterator[np.ndarray[Any, Any]]:
        """The split's texts in order, each a vector of tokens."""


@contextmanager
def evaluating(model: Model) -> Iterator[torch.device]:
    """No gradients, every module in evaluation mode and afterwards in the mode it had; yields the model's device.

    Quantizers stay on: a recipe's model is evaluated as it computes.
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
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: an integer from 1 up")
