"""Compute the loss of a model on a text of any length, in which every token is predicted once.

The text is cut into consecutive windows of equal length. The last window ends at the end of the text, so it may overlap
the window before; tokens in the overlap count only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fewbits.experiments.evaluation.loss import token_losses
from fewbits.experiments.evaluation.protocols import Model


def text_windows(tokens: Sequence[int], separator: int | None, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, targets, and a mask of the targets that count, each [windows, length].

    If the last window overlaps the window before it, its targets in the overlap do not count. A text of fewer than
    `length` tokens is one shorter window.
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
