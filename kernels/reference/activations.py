"""Define the activations of feed-forward layers and their gradients, in FP32 with one rounding at the end."""

import torch
from torch import Tensor

from fewbits.kernels.reference.functions import exponential


def squared_relu(x: Tensor) -> Tensor:
    r = _relu(x)
    return (r * r).to(x.dtype)


def squared_relu_backward(x: Tensor, dy: Tensor) -> Tensor:
    r = _relu(x)
    return (dy.float() * (r + r)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    g = gate.float()
    return ((g * _sigmoid(g)) * up.float()).to(gate.dtype)


def swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    g, d = gate.float(), dy.float()
    s = _sigmoid(g)
    silu = g * s
    dgate = (d * up.float()) * (s + silu * (1.0 - s))
    return dgate.to(gate.dtype), (d * silu).to(up.dtype)


def _relu(x: Tensor) -> Tensor:
    wide = x.float()
    return torch.where(wide < 0, 0.0, wide)


def _sigmoid(x: Tensor) -> Tensor:
    return (1.0 + exponential(-x)).reciprocal()
