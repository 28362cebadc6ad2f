"""Multiply matrices for a linear layer, also with BF16 operands and an FP32 result, which PyTorch lacks on a CPU."""

import torch
from torch import Tensor

from fewbits.kernels.products import matmul, matmul_fp32


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a · b, summed in FP32 and rounded once to dtype."""
    return matmul(a, b) if dtype == a.dtype else matmul_fp32(a, b).to(dtype)
