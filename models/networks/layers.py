"""Define the layers that all models share: linear, embedding, norms, rotary positions, feed-forward.

Parameters are FP32 master copies. A layer computes in the dtype of its input; norms, softmax and rotations compute
internally in FP32. No layer draws random numbers: `initialise` fills the parameters, by name, from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import ClassVar, Final, Literal, Protocol

import torch
from torch import Tensor, nn

from fewbits.kernels.layers.activations import gelu, squared_relu, swiglu
from fewbits.kernels.layers.norms import add_norm, norm
from fewbits.kernels.products import linear, linear_of_cast
from fewbits.models.runtime import KeptCast

# The kinds of linear layers. The first four names are GaussWS's; `in` is Mamba-2's input layer; `head` is the model's
# output head, which is outside the blocks, and `router` chooses experts.
Part = Literal["qkv", "out", "up", "down", "in", "head", "router"]


class Linear(nn.Linear):
    """A linear layer, y = x·Wᵀ + b. W and b are FP32 and are cast to x's dtype.

    part: the kind of layer, for example `down`, by which recipes select layers.
    """

    def __init__(self, in_features: int, out_features: int, part: Part, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.part = part
        self.keeps_cast = True  # True caches the cast weight until the weight changes; False casts it in every pass
        self._cast = KeptCast()

    def reset_parameters(self) -> None:
        """Do nothing: `initialise` fills the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        cast = self._cast.values(self.weight, x.dtype) if self.bias is None and self.keeps_cast else None
        if cast is not None and (y := linear_of_cast(x, self.weight, cast)) is not None:
            return y
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self._cast(self.weight, x.dtype) if self.keeps_cast else self.weight.to(x.dtype), bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing: `initialise` fills the parameters."""


# ------------------------------------------------------------------------------------------------ norms


class Norm(nn.Module):
    """A normalisation of the last dimension in FP32: (x − mean)/√(variance + eps)·(weight + offset) + bias.

    This is the base class of the norms. In a class with `centered = False` (RMS norm), the mean is taken as 0, so the
    variance is mean(x²).
    """

    centered: ClassVar[bool] = True  # False: use 0 in place of the mean
    offset: ClassVar[float] = 0.0

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial values: weight + offset = 1 and bias = 0."""
        self.weight.fill_(1.0 - self.offset)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, eps=self.eps, centered=self.centered, offset=self.offset)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return s = x + y, and s normalised by this layer."""
        return add_norm(x, y, self.weight, self.bias, eps=self.eps, centered=self.centered, offset=self.offset)


class LayerNorm(Norm):
    """A layer norm with mean, variance, weight and optional bias."""


class LayerNorm1p(Norm):
    """A LayerNorm that multiplies by 1 + weight; weight starts at 0, so weight decay pulls the factor to 1.

    It always has a bias, whatever `bias` is, as in Megatron, where "no bias" refers only to linear layers.
    """

    offset = 1.0

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__(width, eps, bias=True)


class RmsNorm(Norm):
    """An RMS norm, weight·x/√(mean(x²) + eps), which never has a bias, whatever the argument `bias` is."""

    centered = False

    def __init__(self, width: int, eps: float, bias: bool = False) -> None:
        super().__init__(width, eps, bias=False)


NORMS: Final[dict[str, Callable[[int, float, bool], Norm]]] = {
    "layernorm": LayerNorm,
    "layernorm1p": LayerNorm1p,
    "rmsnorm": RmsNorm,
}


# ------------------------------------------------------------------------------------------------ positions


def _turns(rotated: int, theta: float, context: int) -> Tensor:
    """Return the cosine and the sine of each rotary angle, [token position, pair of dimensions, cosine or sine].

    rotated: the number of rotated dimensions of a head. theta: the base θ of RoPE's frequencies. context: the number of
    token positions. The result is not a complex tensor, because a module's `.to(dtype)` would drop the imaginary parts.
    """
    with torch.device("cpu"):  # computed on the CPU, so that the bits are the same on every device
        steps = theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), steps)
        return torch.stack((angles.cos(), angles.sin()), -1).float()


class Rope(nn.Module):
    """The angles of rotary position embeddings (RoPE), which rotate the first n = head_dim · fraction dimensions.

    At position t, the neighbouring dimensions (2i, 2i + 1) of a head are rotated by the angle t·θ^(−2i/n), as in
    Llama's and torchtitan's code. Megatron rotates (i, i + n/2) instead, which gives the same model if the rows of W_q
    and W_k are reordered within each head.
    """

    turns: Tensor

    def __init__(self, head_dim: int, fraction: float, theta: float, context: int) -> None:
        super().__init__()
        self.rotated = int(head_dim * fraction)
        self.theta, self.context = theta, context
        self.register_buffer("turns", None, persistent=False)
        self.reset(torch.get_default_device())

    def reset(self, device: torch.device) -> None:
        """Set `turns` to the angles' cosines and sines, on this device; on the meta device only their shape is set."""
        if device.type == "meta":
            self.turns = torch.empty(self.context, self.rotated // 2, 2, device=device)
        else:
            self.turns = _turns(self.rotated, self.theta, self.context).to(device)


# ------------------------------------------------------------------------------------------------ activations


# The functions for DecoderConfig.activation; a gated one takes the results of two linear layers, gate and up.
ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": gelu,  # exact, as in nanoGPT
    "relu2": squared_relu,
}
GATED_ACTIVATIONS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {"swiglu": swiglu}


# ------------------------------------------------------------------------------------------------ feed-forward layers

# A mixture of experts: the router computes in FP32: p = softmax(W·x) over all experts. A token's result is the sum over
# its k experts e with the largest p of p_e·FFN_e(x), where these k values of p are divided by their sum, as in Mixtral;
# a shared expert adds its result for every token. Each expert is a feed-forward layer of its own, which reads its
# tokens in order, so that a recipe quantizes the products of every expert as those of any other linear layer.
#
# In training, a loss for each mixture keeps the experts' loads even: α·E·Σ_e f_e·P_e (arXiv 2101.03961, eq. 4), where
# f_e is the share of choices that fell on expert e and P_e the mean of p_e, both over the tokens of a micro-batch.


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
