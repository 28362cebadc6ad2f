"""Multiply low-precision matrices with FP32 sums; arithmetic.md ("Products") states what matmul_fp32 guarantees."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fewbits.kernels import ops
from fewbits.kernels.backends import reference
from fewbits.kernels.backends.processor import has_fast_bf16_products
from fewbits.kernels.operators import can_skip_dispatcher

# True if BF16 operands are widened to FP32. Determined once, at import, by reading /proc/cpuinfo, which torch.compile
# cannot trace.
WIDENS = not has_fast_bf16_products()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b in a's dtype, summed in FP32 and rounded once.

    On a CPU, FP16 operands are widened and multiplied in FP32, because torch's own product may sum in FP16. BF16
    operands are widened too on processors where torch multiplies BF16 only in scalar loops, because FP32 is faster.
    """
    if _is_widened(a):
        with torch.autocast("cpu", enabled=False):  # autocast would round the operands again
            return torch.matmul(a.float(), b.float()).to(a.dtype)
    return torch.matmul(a, b)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · wᵀ + bias in x's dtype, computed like `matmul`; the bias is added before the sum is rounded."""
    return _WidenedLinear.apply(x, w, bias) if _is_widened(x) else F.linear(x, w, bias)


def linear_of_cast(x: Tensor, w: Tensor, cast: Tensor) -> Tensor | None:
    """Return x · castᵀ, where `cast` is the weight w in x's dtype; the gradient goes to w, in w's dtype.

    Results and gradients equal those of `linear` on a cast weight, with fewer calls of torch. Return None if the caller
    has to use `linear`: if `linear` would widen the operands to FP32, under autocast, if x is not contiguous, and for
    tensors that are not plain tensors on a CPU or a GPU.
    """
    ordinary = can_skip_dispatcher((x, w, cast)) and x.is_contiguous() and not torch.is_autocast_enabled(x.device.type)
    return _LinearOfCast.apply(x, w, cast) if ordinary and not _is_widened(x) else None


class _LinearOfCast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, cast: Tensor) -> Tensor:
        ctx.save_for_backward(x, cast)
        ctx.dtype = w.dtype
        return torch.mm(x.view(-1, x.shape[-1]), cast.t()).view(*x.shape[:-1], cast.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, cast = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = torch.mm(rows, cast).view(x.shape) if ctx.needs_input_grad[0] else None
        dw = torch.mm(rows.t(), x.view(-1, x.shape[-1])).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class _WidenedLinear(Function):
    """The autograd function of `linear` for operands that are widened to FP32, but saved in their own dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), w.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1]).float()
        dx = torch.mm(rows, w.float()).to(x.dtype).view(x.shape) if ctx.needs_input_grad[0] else None
        dw = torch.mm(rows.t(), x.reshape(-1, x.shape[-1]).float()).to(w.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, rows.sum(0).to(w.dtype) if ctx.needs_input_grad[2] else None


def _is_widened(x: Tensor) -> bool:
    return x.device.type == "cpu" and (x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and WIDENS))


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a [M, K] · b [K, N], summed and returned in FP32.

    BF16 operands on a CPU use our kernel, which reads row-major and column-major matrices without a copy. BF16 and
    float16 on CUDA use torch's product. All other operands are widened to FP32 first.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"cannot multiply shapes {list(a.shape)} and {list(b.shape)}: valid shapes are [M, K] and [K, N]"
        )
    if a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    if a.device.type == "cpu" and a.dtype == b.dtype == torch.bfloat16:
        return ops.matmul_fp32(a, b)
    return reference.matmul_fp32(a, b)
