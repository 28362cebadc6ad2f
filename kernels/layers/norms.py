"""Compute layer norms and RMS norms of rows, optionally after the addition of a residual branch, for training.

On CPUs and NVIDIA's GPUs one operator sums in FP32, also for the gradients of weight and bias. (torch's own operator
for CPUs sums these gradients in the dtype of x, and in BF16 they are wrong by several percent.) On other devices torch
computes the norm of the tensor widened to FP32.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.backends.cpu import threads
from fewbits.kernels.layers.library import DTYPES, address, gpu_layers, is_compiled, is_float, library, takes
from fewbits.kernels.operators import define, differentiate
from fewbits.kernels.reference import layers as reference


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float,
    centered: bool,
    offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return (x − mean)/√(variance + eps)·(weight + offset) + bias over the last dimension, computed in FP32.

    weight, bias: of the shape of the last dimension of x, or of the last two dimensions of x (for example, with weights
        for each head). centered: False computes an RMS norm, in which the mean is taken as 0. offset: a constant that
        is added to the weight. dtype: the dtype of the result; None: the dtype of x.
    """
    dtype = dtype or x.dtype
    if _takes(x, weight, bias) and dtype in DTYPES:
        return _norm_of(x, weight, bias, offset, eps, centered, dtype)[0]
    wide = x if x.dtype == torch.float64 else x.float()
    factor = (weight + offset if offset else weight).to(wide.dtype)
    shift = None if bias is None else bias.to(wide.dtype)
    if centered and weight.dim() == 1:
        return F.layer_norm(wide, weight.shape, factor, shift, eps).to(dtype)
    plain = F.layer_norm(wide, wide.shape[-1:], eps=eps) if centered else F.rms_norm(wide, wide.shape[-1:], eps=eps)
    return (plain * factor if shift is None else plain * factor + shift).to(dtype)


def add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, centered: bool, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (s, norm(s)), where s is x + y rounded to their dtype; the other arguments are those of `norm`."""
    if _takes(x, weight, bias) and x.dtype == y.dtype and x.shape == y.shape:
        s, n, *_ = _add_norm_of(x, y, weight, bias, offset, eps, centered)
        return s, n
    s = x + y
    return s, norm(s, weight, bias, eps=eps, centered=centered, offset=offset)


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return takes(x) and all(p.dtype == torch.float32 for p in (weight, bias) if p is not None)


# ------------------------------------------------------------------------------------------------ operators


class _Call(ctypes.Structure):  # NormCall of csrc/cpu_norm.cpp
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("rows", "groups", "width")],
        *[(name, ctypes.c_void_p) for name in ("weight", "bias")],
        *[(name, ctypes.c_float) for name in ("offset", "eps")],
        *[(name, ctypes.c_int32) for name in ("centered", "threads")],
    ]


def _call(x: Tensor, weight: Tensor, bias: Tensor | None, offset: float, eps: float, centered: bool) -> _Call:
    width = weight.shape[-1]
    rows, groups = x.numel() // max(weight.numel(), 1), weight.numel() // max(width, 1)
    return _Call(
        *(rows, groups, width, address(weight), address(bias), offset, eps, centered), threads=threads(x.numel())
    )


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, offset: float, eps: float, centered: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = x.contiguous(), weight.contiguous(), _contiguous(bias)
    n, mean, inverse = _norm_fake(x, weight, bias, offset, eps, centered, dtype)
    if (gpu := gpu_layers(x)) is not None:
        gpu.norm(x, None, weight, bias, offset, eps, None, (n, mean, inverse))
        return n, mean, inverse
    if not is_compiled(x.device.type):
        return reference.norm(x, weight, bias, offset, eps, centered, dtype)
    call = _call(x, weight, bias, offset, eps, centered)
    library().fb_norm(
        *(ctypes.byref(call), is_float(x), is_float(n), x.data_ptr(), None, None),
        *(n.data_ptr(), mean.data_ptr(), inverse.data_ptr()),
    )
    return n, mean, inverse


def _norm_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, offset: float, eps: float, centered: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[:-1]
    mean = x.new_empty(rows if centered else 0, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), mean, x.new_empty(rows, dtype=torch.float32)


def _add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, offset: float, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y, weight, bias = x.contiguous(), y.contiguous(), weight.contiguous(), _contiguous(bias)
    s, n, mean, inverse = _add_norm_fake(x, y, weight, bias, offset, eps, centered)
    if (gpu := gpu_layers(x)) is not None:
        gpu.norm(x, y, weight, bias, offset, eps, s, (n, mean, inverse))
        return s, n, mean, inverse
    if not is_compiled(x.device.type):
        s = x + y
        return s, *reference.norm(s, weight, bias, offset, eps, centered, x.dtype)
    call = _call(x, weight, bias, offset, eps, centered)
    library().fb_norm(
        *(ctypes.byref(call), is_float(x), is_float(n), x.data_ptr(), y.data_ptr(), s.data_ptr()),
        *(n.data_ptr(), mean.data_ptr(), inverse.data_ptr()),
    )
    return s, n, mean, inverse


def _add_norm_fake(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, offset: float, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *_norm_fake(x, weight, bias, offset, eps, centered, x.dtype)


def _norm_backward(
    s: Tensor,
    ds: Tensor | None,
    dn: Tensor,
    weight: Tensor,
    biased: bool,
    mean: Tensor,
    inverse: Tensor,
    offset: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    s, dn, weight, ds = s.contiguous(), dn.contiguous(), weight.contiguous(), _contiguous(ds)
    mean, inverse = mean.contiguous(), inverse.contiguous()
    dx, dweight, dbias = _norm_backward_fake(s, ds, dn, weight, biased, mean, inverse, offset, centered)
    if (gpu := gpu_layers(s)) is not None:
        gpu.norm_backward(s, ds, dn, weight, mean, inverse, offset, (dx, dweight, dbias if biased else None))
        return dx, dweight, dbias
    if not is_compiled(s.device.type):
        return reference.norm_backward(s, ds, dn, weight, biased, mean, inverse, offset, centered)
    call = _call(s, weight, None, offset, 0.0, centered)
    library().fb_norm_backward(
        *(ctypes.byref(call), is_float(s), is_float(dn), s.data_ptr(), address(ds), dn.data_ptr(), mean.data_ptr()),
        *(inverse.data_ptr(), dx.data_ptr(), dweight.data_ptr(), address(dbias) if biased else None),
    )
    return dx, dweight, dbias


def _norm_backward_fake(
    s: Tensor, ds: Tensor | None, dn: Tensor, weight: Tensor, biased: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return s.new_empty(s.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape if biased else 0)


_SETTINGS = "float offset, float eps, bool centered"
define(
    f"norm(Tensor x, Tensor weight, Tensor? bias, {_SETTINGS}, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _norm,
    _norm_fake,
)
define(
    f"add_norm(Tensor x, Tensor y, Tensor weight, Tensor? bias, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _add_norm,
    _add_norm_fake,
)
_norm_gradients = define(
    "norm_backward(Tensor s, Tensor? ds, Tensor dn, Tensor weight, bool biased, Tensor mean, Tensor inverse, "
    "float offset, bool centered) -> (Tensor, Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
)


# ------------------------------------------------------------------------------------------------ gradients


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.offset, _, ctx.centered, _ = inputs
    ctx.biased = bias is not None
    ctx.set_materialize_grads(False)  # else torch fills a tensor with zeros for each statistic
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, *output[1:])


def _keep_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, ctx.offset, _, ctx.centered = inputs
    ctx.biased = bias is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(output[0], weight, *output[2:])


def _gradients(ctx: Any, ds: Tensor | None, dn: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    s, weight, mean, inverse = ctx.saved_tensors
    dx, dweight, dbias = _norm_gradients(s, ds, dn, weight, ctx.biased, mean, inverse, ctx.offset, ctx.centered)
    return dx, dweight, dbias if ctx.biased else None


def _backward(ctx: Any, dn: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dn is None:
        return (None,) * 7
    return *_gradients(ctx, None, dn), None, None, None, None


def _add_backward(ctx: Any, ds: Tensor | None, dn: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dn is None:
        return ds, ds, *[None] * 5
    dx, dweight, dbias = _gradients(ctx, ds, dn)
    return dx, dx, dweight, dbias, None, None, None


_norm_of = differentiate("norm", _keep_norm, _backward)
_add_norm_of = differentiate("add_norm", _keep_add_norm, _add_backward)
