"""The product of two BF16 matrices in FP32, which PyTorch has on CUDA alone: README.md says what it promises."""

import torch
from torch import Tensor

from fewbits.kernels import ops, reference  # noqa: F401, ops defines the operator


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] · b [K, N], summed and returned in FP32.

    Fast for BF16 on the CPU, whichever of its dimensions is contiguous in memory; float16 and BF16 on CUDA are torch's;
    anything else is widened to FP32 first.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"no product of shapes {list(a.shape)} and {list(b.shape)}: valid are [M, K] and [K, N]")
    if a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    if a.device.type == "cpu" and a.dtype == b.dtype == torch.bfloat16:
        return torch.ops.fewbits.matmul_fp32(a, b)
    return reference.matmul_fp32(a, b)
