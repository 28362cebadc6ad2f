"""The products of a linear layer, and the one that PyTorch lacks on a CPU: BF16 operands, FP32 result."""

import torch
from torch import Tensor

from fewbits.kernels.products import matmul, matmul_fp32


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a · b, summed in FP32 and rounded once to dtype."""
    return matmul(a, b) if dtype == a.dtype else matmul_fp32(a, b).to(dtype)
