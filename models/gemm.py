"""The products of a linear layer, and the one that PyTorch lacks: BF16 operands, FP32 result."""

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a · b, summed in FP32 and rounded once to dtype."""
    if dtype == a.dtype:
        return a @ b
    if dtype == torch.float32 and a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    # A product of two BF16 numbers is exact in FP32, so widening the operands changes nothing but the time.
    return (a.float() @ b.float()).to(dtype)
