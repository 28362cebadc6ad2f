"""Compute the activations of feed-forward layers and their gradients, each in one pass over its operands.

The arithmetic is FP32, rounded once. On devices other than the CPU torch computes the same functions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.backends.cpu import threads
from fewbits.kernels.layers.library import is_compiled, is_float, library, takes
from fewbits.kernels.operators import LIBRARY, define
from fewbits.kernels.reference import activations as reference


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)²."""
    return torch.ops.fewbits.squared_relu(x) if takes(x) else F.relu(x).square()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate·sigmoid(gate)·up, for two tensors of the same shape and dtype."""
    if takes(gate, up) and gate.shape == up.shape and gate.dtype == up.dtype:
        return torch.ops.fewbits.swiglu(gate, up)
    return F.silu(gate) * up


def _squared_relu(x: Tensor) -> Tensor:
    if not is_compiled():
        return reference.squared_relu(x)
    x = x.contiguous()
    y = torch.empty_like(x)
    library().fb_squared_relu(is_float(x), x.numel(), x.data_ptr(), y.data_ptr(), threads(x.numel()))
    return y


def _squared_relu_backward(x: Tensor, dy: Tensor) -> Tensor:
    if not is_compiled():
        return reference.squared_relu_backward(x, dy)
    x, dy = x.contiguous(), dy.contiguous()
    dx, n = torch.empty_like(x), x.numel()
    library().fb_squared_relu_backward(is_float(x), n, x.data_ptr(), dy.data_ptr(), dx.data_ptr(), threads(n))
    return dx


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if not is_compiled():
        return reference.swiglu(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    y, n = torch.empty_like(gate), gate.numel()
    library().fb_swiglu(is_float(gate), n, gate.data_ptr(), up.data_ptr(), y.data_ptr(), threads(n))
    return y


def _swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    if not is_compiled():
        return reference.swiglu_backward(gate, up, dy)
    gate, up, dy = gate.contiguous(), up.contiguous(), dy.contiguous()
    dgate, dup, n = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    library().fb_swiglu_backward(
        *(is_float(gate), n, *(x.data_ptr() for x in (gate, up, dy, dgate, dup)), threads(n)),
    )
    return dgate, dup


def _empty(x: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape)


define("squared_relu(Tensor x) -> Tensor", _squared_relu, _empty, devices=("CPU",))
define("squared_relu_backward(Tensor x, Tensor dy) -> Tensor", _squared_relu_backward, _empty, devices=("CPU",))
define("swiglu(Tensor gate, Tensor up) -> Tensor", _swiglu, _empty, devices=("CPU",))
define(
    "swiglu_backward(Tensor gate, Tensor up, Tensor dy) -> (Tensor, Tensor)",
    _swiglu_backward,
    lambda gate, up, _: (_empty(gate), _empty(up)),
    devices=("CPU",),
)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


torch.library.register_autograd(
    "fewbits::squared_relu",
    lambda ctx, dy: torch.ops.fewbits.squared_relu_backward(*ctx.saved_tensors, dy),
    setup_context=_keep,
    lib=LIBRARY,
)
torch.library.register_autograd(
    "fewbits::swiglu",
    lambda ctx, dy: torch.ops.fewbits.swiglu_backward(*ctx.saved_tensors, dy),
    setup_context=_keep,
    lib=LIBRARY,
)
