"""Define the layers that all models share: linear, embedding, norms, rotary positions, attention, activations.

Parameters are FP32 master copies. A layer computes in the dtype of its input; norms, softmax and rotations compute
internally in FP32. No layer draws random numbers: `initialise` fills the parameters, by name, from a seed.
"""

from collections.abc import Callable
from typing import ClassVar, Final, Literal

import torch
from torch import Tensor, nn

from fewbits.kernels.layers.activations import gelu, squared_relu, swiglu
from fewbits.kernels.layers.norms import add_norm, norm
from fewbits.kernels.products import linear, linear_of_cast
from fewbits.models.updates import KeptCast

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
