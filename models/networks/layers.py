"""Define the layers that all models share: linear, embedding, norms, rotary positions, attention, activations.

Parameters are FP32 master copies. A layer computes in the dtype of its input; norms, softmax and rotations compute
internally in FP32. No layer draws random numbers: `initialise` fills the parameters, by name, from a seed.

RMSNorm and attention have a second implementation for CPUs, because PyTorch's is slow there. The docstrings of
`_RmsNorm` and `_unfused_attention` compare their times with PyTorch's (8×256 tokens of width 256 in BF16, forward and
backward on one core with AVX512-BF16).

Shape suffixes: B batch, T token, D width, H head, K key and value head, E head's dimension.
"""

from collections.abc import Callable
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fewbits.kernels.products import linear, matmul

# GaussWS's names for the linear layers of a block. `in` is Mamba-2's input layer, which fits none of these names;
# `head` is the model's output head.
Part = Literal["qkv", "out", "up", "down", "in", "head"]
Norm = Callable[[int, float, bool], nn.Module]
UNFUSED_UP_TO: Final = 512  # tokens; for more, the memory of the T×T scores outweighs the gain in speed


class Linear(nn.Linear):
    """A linear layer, y = x·Wᵀ + b in x's dtype, with W and b in FP32; recipes select it by `part`."""

    def __init__(self, in_features: int, out_features: int, part: Part, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.part = part

    def reset_parameters(self) -> None:
        """Do nothing: `initialise` fills the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype), bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Do nothing: `initialise` fills the parameters."""


# ------------------------------------------------------------------------------------------------ norms


class LayerNorm(nn.Module):
    """A layer norm, weight·(x − mean)/√(var + eps) + bias, in FP32."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return _layer_norm(x, self.weight, self.bias, self.eps)


class LayerNorm1p(LayerNorm):
    """A LayerNorm that multiplies by 1 + weight; weight starts at 0, so weight decay pulls the factor to 1.

    It always has a bias, as in Megatron, where "no bias" refers only to linear layers.
    """

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__(width, eps, bias=True)
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return _layer_norm(x, 1 + self.weight, self.bias, self.eps)


class RmsNorm(nn.Module):
    """An RMS norm, weight·x/√(mean(x²) + eps), in FP32."""

    def __init__(self, width: int, eps: float, bias: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, x.dtype)


NORMS: Final[dict[str, Norm]] = {"layernorm": LayerNorm, "layernorm1p": LayerNorm1p, "rmsnorm": RmsNorm}


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if x.is_cpu:  # accepts BF16 with FP32 weights, and computes in FP32
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Normalise x over its last dimension and multiply by weight, in FP32; return the result in `dtype`."""
    if x.is_cpu:
        return _RmsNorm.apply(x, weight, eps, dtype)
    return (F.rms_norm(x.float(), x.shape[-1:], eps=eps) * weight).to(dtype)


class _RmsNorm(Function):
    """An RMS norm for CPUs that takes 1.8 ms; F.rms_norm, a chain of operations in both passes, takes 2.8 ms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x_FP32 = x.float()
        inverse = torch.linalg.vector_norm(x_FP32, dim=-1, keepdim=True)
        inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x_FP32 * inverse).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x.float() * inverse
        dy_FP32 = dy.float()  # convert once: operations on two dtypes are slow
        product = normed * dy_FP32
        dweight = product.flatten(0, -weight.ndim - 1).sum(0)
        mean = product.mul_(weight).mean(-1, keepdim=True)
        dx = (dy_FP32 * weight).sub_(normed.mul_(mean)).mul_(inverse)
        return dx.to(x.dtype), dweight, None, None


# ------------------------------------------------------------------------------------------------ positions


def _turns(rotated: int, theta: float, context: int) -> Tensor:
    """Return the cosine and sine of every angle, [context, rotated / 2, 2].

    They are not complex numbers, because a module's `.to(dtype)` drops the imaginary part of those.
    """
    with torch.device("cpu"):  # so that the bits are the same for any device
        steps = theta ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), steps)
        return torch.stack((angles.cos(), angles.sin()), -1).float()


class Rope(nn.Module):
    """Rotary positions: rotates the first n dimensions of each head, a `fraction` of them all, in pairs.

    In token t, the neighbours (2i, 2i + 1) are rotated by the angle t·θ^(−2i/n), as in Llama's and torchtitan's code.
    Megatron pairs (i, i + n/2) instead, which is the same model with the rows of W_q and W_k in another order within
    each head.
    """

    turns: Tensor

    def __init__(self, head_dim: int, fraction: float, theta: float, context: int) -> None:
        super().__init__()
        self.rotated = int(head_dim * fraction)
        device = torch.get_default_device()
        if device.type == "meta":
            turns = torch.empty(context, self.rotated // 2, 2)
        else:
            turns = _turns(self.rotated, theta, context).to(device)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, x_BTHE: Tensor) -> Tensor:
        turned, kept = x_BTHE.split((self.rotated, x_BTHE.shape[-1] - self.rotated), -1)
        turns = torch.view_as_complex(self.turns[: x_BTHE.shape[1], None].float())
        pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * turns).flatten(-2).to(x_BTHE.dtype)
        return torch.cat((turned, kept), -1) if kept.shape[-1] else turned


# ------------------------------------------------------------------------------------------------ attention


def causal_attention(q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
    """Return softmax(q·kᵀ/√E)·v of each token over itself and those before it; H/K heads share a key and value head."""
    q_BHTE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
    tokens, shared = q_BHTE.shape[2], q_BHTE.shape[1] // k_BKTE.shape[1]
    if q_BHTE.is_cpu and q_BHTE.dtype == torch.bfloat16 and tokens <= UNFUSED_UP_TO:
        y_BHTE = _unfused_attention(q_BHTE, k_BKTE, v_BKTE, shared)
    else:
        y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=shared > 1)
    return y_BHTE.transpose(1, 2)


def _unfused_attention(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, shared: int) -> Tensor:
    """Compute attention with scores in BF16, like Megatron's unfused attention, and a softmax that uses FP32 inside.

    It takes 15 ms for 4 heads of 64; the fused kernel takes 31 ms.
    """
    if shared > 1:
        k_BKTE, v_BKTE = (x.repeat_interleave(shared, 1) for x in (k_BKTE, v_BKTE))
    tokens, size = q_BHTE.shape[-2:]
    future = torch.full((tokens, tokens), -torch.inf, dtype=q_BHTE.dtype).triu_(1)
    scores = matmul(q_BHTE * size**-0.5, k_BKTE.mT) + future
    return matmul(torch.softmax(scores, -1), v_BKTE)


# ------------------------------------------------------------------------------------------------ activations


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,  # exact, as in nanoGPT
    "swiglu": F.silu,  # applied to the gate, whose result is multiplied by up
    "relu2": squared_relu,
}
