"""Compute the activations of feed-forward layers and their gradients, each in one pass over its operands.

The arithmetic is FP32, rounded once. On devices other than the CPU torch computes the same functions.
"""

from collections.abc import Callable
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


def gelu(x: Tensor) -> Tensor:
    """Return x·Φ(x), the exact GELU, where Φ is the normal distribution function."""
    return torch.ops.fewbits.gelu(x) if takes(x) and x.dtype == torch.bfloat16 else F.gelu(x)  # in FP32 torch is faster


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate·sigmoid(gate)·up, for two tensors of the same shape and dtype."""
    if takes(gate, up) and gate.shape == up.shape and gate.dtype == up.dtype:
        return torch.ops.fewbits.swiglu(gate, up)
    return F.silu(gate) * up


def _of_one(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function of one operand that the library and the reference call by that name."""

    def run(x: Tensor) -> Tensor:
        if not is_compiled():
            return getattr(reference, name)(x)
        x = x.contiguous()
        y = torch.empty_like(x)
        getattr(library(), f"fb_{name}")(is_float(x), x.numel(), x.data_ptr(), y.data_ptr(), threads(x.numel()))
        return y

    return run


def _backward_of_one(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, dy: Tensor) -> Tensor:
        if not is_compiled():
            return getattr(reference, f"{name}_backward")(x, dy)
        x, dy = x.contiguous(), dy.contiguous()
        dx, n = torch.empty_like(x), x.numel()
        call = getattr(library(), f"fb_{name}_backward")
        call(is_float(x), n, x.data_ptr(), dy.data_ptr(), dx.data_ptr(), threads(n))
        return dx

    return run


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


define("swiglu(Tensor gate, Tensor up) -> Tensor", _swiglu, _empty, devices=("CPU",))
define(
    "swiglu_backward(Tensor gate, Tensor up, Tensor dy) -> (Tensor, Tensor)",
    _swiglu_backward,
    lambda gate, up, _: (_empty(gate), _empty(up)),
    devices=("CPU",),
)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(name: str) -> None:
    backward = getattr(torch.ops.fewbits, f"{name}_backward")
    torch.library.register_autograd(
        f"fewbits::{name}",
        lambda ctx, dy: backward(*ctx.saved_tensors, dy),
        setup_context=_keep,
        lib=LIBRARY,
    )


for _name in ("squared_relu", "gelu"):
    define(f"{_name}(Tensor x) -> Tensor", _of_one(_name), _empty, devices=("CPU",))
    define(f"{_name}_backward(Tensor x, Tensor dy) -> Tensor", _backward_of_one(_name), _empty, devices=("CPU",))
    _differentiate(_name)
_differentiate("swiglu")
