"""Compute the activations of feed-forward layers and their gradients; each function reads its operands once.

The arithmetic is FP32, and results are rounded once. On devices other than CPUs and NVIDIA's GPUs, torch computes the
same functions.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.backends.cpu import threads
from fewbits.kernels.layers.library import gpu_layers, is_compiled, is_float, library, takes
from fewbits.kernels.operators import define, differentiate
from fewbits.kernels.reference import layers as reference


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)²."""
    return _squared_relu_of(x) if takes(x) else F.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """Return x·Φ(x), the exact GELU, where Φ is the normal distribution function."""
    return _gelu_of(x) if takes(x) and x.dtype == torch.bfloat16 else F.gelu(x)  # in FP32 torch is faster


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate·sigmoid(gate)·up, for two tensors of the same shape and dtype."""
    if takes(gate, up) and gate.shape == up.shape and gate.dtype == up.dtype:
        return _swiglu_of(gate, up)
    return F.silu(gate) * up


def _of_one(name: str) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the activation `name`, `squared_relu` or `gelu`.

    It calls the CUDA kernels or the compiled library, or the reference in plain torch if neither works here.
    """

    def run(x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        if (gpu := gpu_layers(x)) is not None:
            gpu.activation(name, (x,), (y,))
            return y
        if not is_compiled(x.device.type):
            return getattr(reference, name)(x)
        getattr(library(), f"fb_{name}")(is_float(x), x.numel(), x.data_ptr(), y.data_ptr(), threads(x.numel()))
        return y

    return run


def _backward_of_one(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, dy: Tensor) -> Tensor:
        x, dy = x.contiguous(), dy.contiguous()
        dx, n = torch.empty_like(x), x.numel()
        if (gpu := gpu_layers(x)) is not None:
            gpu.activation(f"{name}_backward", (x, dy), (dx,))
            return dx
        if not is_compiled(x.device.type):
            return getattr(reference, f"{name}_backward")(x, dy)
        call = getattr(library(), f"fb_{name}_backward")
        call(is_float(x), n, x.data_ptr(), dy.data_ptr(), dx.data_ptr(), threads(n))
        return dx

    return run


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y, n = torch.empty_like(gate), gate.numel()
    if (gpu := gpu_layers(gate)) is not None:
        gpu.activation("swiglu", (gate, up), (y,))
        return y
    if not is_compiled(gate.device.type):
        return reference.swiglu(gate, up)
    library().fb_swiglu(is_float(gate), n, gate.data_ptr(), up.data_ptr(), y.data_ptr(), threads(n))
    return y


def _swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    gate, up, dy = gate.contiguous(), up.contiguous(), dy.contiguous()
    dgate, dup, n = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    if (gpu := gpu_layers(gate)) is not None:
        gpu.activation("swiglu_backward", (gate, up, dy), (dgate, dup))
        return dgate, dup
    if not is_compiled(gate.device.type):
        return reference.swiglu_backward(gate, up, dy)
    library().fb_swiglu_backward(
        *(is_float(gate), n, *(x.data_ptr() for x in (gate, up, dy, dgate, dup)), threads(n)),
    )
    return dgate, dup


def _empty(x: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(x.shape)


define("swiglu(Tensor gate, Tensor up) -> Tensor", _swiglu, _empty)
_swiglu_gradients = define(
    "swiglu_backward(Tensor gate, Tensor up, Tensor dy) -> (Tensor, Tensor)",
    _swiglu_backward,
    lambda gate, up, _: (_empty(gate), _empty(up)),
)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiated(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    return differentiate(name, _keep, lambda ctx, dy: backward(*ctx.saved_tensors, dy))


def _define_of_one(name: str) -> Callable[[Tensor], Tensor]:
    define(f"{name}(Tensor x) -> Tensor", _of_one(name), _empty)
    schema = f"{name}_backward(Tensor x, Tensor dy) -> Tensor"
    return _differentiated(name, define(schema, _backward_of_one(name), _empty))


_squared_relu_of, _gelu_of = map(_define_of_one, ("squared_relu", "gelu"))
_swiglu_of = _differentiated("swiglu", _swiglu_gradients)
