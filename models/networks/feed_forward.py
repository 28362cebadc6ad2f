"""Define the feed-forward layers: a dense one, and a mixture of experts, of which each token reads a few.

The router computes in FP32: p = softmax(W·x) over all experts. A token's result is the sum over its k experts e with
the largest p of p_e·FFN_e(x), where these k values of p are divided by their sum, as in Mixtral; a shared expert adds
its result for every token. Each expert is a feed-forward layer of its own, which reads its tokens in order, so that a
recipe quantizes the products of every expert as those of any other linear layer.

In training, a loss for each mixture keeps the experts' loads even: α·E·Σ_e f_e·P_e (arXiv 2101.03961, eq. 4), where f_e
is the share of choices that fell on expert e and P_e the mean of p_e, both over the tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from fewbits.models.networks.layers import ACTIVATIONS, GATED_ACTIVATIONS, Linear


class Sizes(Protocol):
    """What a feed-forward part reads of a DecoderConfig."""

    @property
    def width(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def bias(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    @property
    def experts(self) -> int: ...
    @property
    def active_experts(self) -> int: ...
    @property
    def shared_ffn(self) -> int: ...
    @property
    def balance(self) -> float: ...


_balance: ContextVar[list[Tensor] | None] = ContextVar("balance", default=None)


@contextmanager
def balance_losses() -> Iterator[list[Tensor]]:
    """Yield a list to which mixtures add their balance losses in the forward passes of training inside the block."""
    losses: list[Tensor] = []
    token = _balance.set(losses)
    try:
        yield losses
    finally:
        _balance.reset(token)


class FeedForward(nn.Module):
    """The feed-forward layer: `down(activation(up(x)))`; for gated activations, `down(activation(gate(x), up(x)))`."""

    def __init__(self, config: Sizes, ffn: int = 0) -> None:
        super().__init__()
        ffn = ffn or config.ffn
        up = partial(Linear, config.width, ffn, part="up", bias=config.bias)
        self.gate = up() if config.activation in GATED_ACTIVATIONS else None
        self.up = up()
        self.down = Linear(ffn, config.width, part="down", bias=config.bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(ACTIVATIONS[self.activation](self.up(x)))
        return self.down(GATED_ACTIVATIONS[self.activation](self.gate(x), self.up(x)))


class MixtureOfExperts(nn.Module):
    """A mixture of experts in place of a feed-forward layer; the module's docstring defines it."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.active, self.balance = config.active_experts, config.balance
        self.router = Linear(config.width, config.experts, part="router")
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.experts))
        self.shared = FeedForward(config, config.shared_ffn) if config.shared_ffn else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        p_NE = self.router(x_ND.float()).softmax(-1)
        p_NK, chosen_NK = p_NE.topk(self.active)
        p_NK = p_NK / p_NK.sum(-1, keepdim=True)
        loads = _loads(chosen_NK, len(self.experts))
        self._add_balance_loss(p_NE, loads)

        order = chosen_NK.flatten().argsort(stable=True)  # the tokens of expert 0, then those of expert 1 …
        # Every token is copied k times before its copies are sorted, so that the backward pass adds k gradients in the
        # same order in every run.
        copies = x_ND[:, None].expand(-1, self.active, -1).flatten(0, 1).index_select(0, order)
        # An expert without tokens is called, too: ranks must have gradients of the same parameters.
        results = [expert(rows) for expert, rows in zip(self.experts, copies.split(loads), strict=True)]
        y_BTKD = torch.cat(results).index_select(0, order.argsort()).view(*x_BTD.shape[:2], self.active, -1)
        y_BTD = (y_BTKD.float() * p_NK.view(y_BTKD.shape[:3])[..., None]).sum(2).to(x_BTD.dtype)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)

    def _add_balance_loss(self, p_NE: Tensor, loads: list[int]) -> None:
        if not (self.balance and self.training and torch.is_grad_enabled()):
            return
        # Also computed where nobody collects it: a recomputed forward pass must save what the first one has saved.
        shares = p_NE.new_tensor(loads) / (self.active * len(p_NE))
        loss = self.balance * len(loads) * (shares * p_NE.mean(0)).sum()
        if (losses := _balance.get()) is not None:
            losses.append(loss)


def _loads(chosen: Tensor, experts: int) -> list[int]:
    """Return how many tokens each expert reads. chosen: the experts of each token."""
    if type(chosen) is not Tensor:  # a fake tensor, by which memory is estimated, has no values
        each, more = divmod(chosen.numel(), experts)
        return [each + (number < more) for number in range(experts)]
    loads: list[int] = torch.bincount(chosen.flatten(), minlength=experts).tolist()
    return loads
