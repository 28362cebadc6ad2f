"""Multiply matrices in FP8: torch's scaled product gets codes and scales, without rounded values between.

    y[m, n] = (Σ_k A[m, k] · B[k, n]) · a[m] · b[n]      A, B: E4M3 codes; a, b: FP32 scales, one or one per row, column

`encode` stores the factor s that maps a block to the format's range, so the scale of its codes is 1/s. The emulation
rounds the value code/s to BF16 and then multiplies; here nothing is rounded before the sum. So the two differ by the
rounding of the operands to BF16: for u = 2^-8, half the distance of neighbouring BF16 numbers relative to them, by at
most (2u + u²) Σ |A·a| |B·b|, and by the order of the FP32 sums and the last rounding.

On GPUs the sum is that of the tensor cores, which may be less than FP32 (accumulators.py). On CPUs the codes are
widened to BF16, which holds all E4M3 values, and `matmul_fp32` sums their products in FP32. Torch's FP8 product for
CPUs computes the same sums, but a hundred times slower.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.kernels import ops  # noqa: F401, registers the operators
from fewbits.kernels.operators import call
from fewbits.kernels.products import matmul_fp32
from fewbits.kernels.quantizer import Mixture, Quantizer

MULTIPLE = 16  # of the length of the sum and of the columns of the result, in FP8 products of GPUs
VALID = "e4m3 with block tensor or channel and scaling amax"


class Fp8Operand(NamedTuple):
    """A matrix of E4M3 codes, with a scale for all elements, for each row or for each column: value = code · scale."""

    codes: Tensor  # float8_e4m3fn
    scales: Tensor  # float32 [1, 1], [rows, 1] or [1, columns]

    def t(self) -> Fp8Operand:
        return Fp8Operand(self.codes.t(), self.scales.t())


def is_executable(spec: Quantizer | Mixture | None) -> bool:
    """Tell whether FP8 products can read the codes of this quantizer; VALID says which quantizers that are."""
    if not isinstance(spec, Quantizer):
        return False
    return (spec.format.name, spec.scaling) == ("e4m3", "amax") and str(spec.block) in ("tensor", "channel")


def encode_fp8(x: Tensor, spec: str, axis: int, seed: int) -> Fp8Operand:
    """Return the codes and scales of x quantized by an executable quantizer in string form."""
    codes, factors, _ = call(torch.ops.fewbits.encode, x, spec, axis, seed)
    return Fp8Operand(codes.view(torch.float8_e4m3fn), factors.reciprocal())


def scaled_product(a: Fp8Operand, b: Fp8Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return a · b + bias in dtype, rounded once after the sum, the scales and the bias.

    a has its scales along rows and b along columns. Codes that do not lie in memory as the product reads them, a by
    rows and b by columns, are copied.
    """
    rows, inner, cols = *a.codes.shape, b.codes.shape[1]
    if inner % MULTIPLE or cols % MULTIPLE:
        raise ValueError(
            f"an FP8 product of {rows}x{inner} and {inner}x{cols}: expected {inner} and {cols} to be multiples of "
            f"{MULTIPLE}"
        )
    if a.codes.device.type == "cpu":
        y = matmul_fp32(a.codes.bfloat16(), b.codes.bfloat16()) * a.scales * b.scales
        return (y if bias is None else y + bias).to(dtype)
    left, right = a.codes.contiguous(), b.codes.t().contiguous().t()
    if dtype != torch.bfloat16:  # with scales per row, torch's product has BF16 results only
        one = torch.ones((), device=left.device)
        y = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32) * a.scales * b.scales
        return (y if bias is None else y + bias).to(dtype)
    if a.scales.numel() == b.scales.numel() == 1:
        scales = a.scales.reshape(()), b.scales.reshape(())
    else:
        # As vectors first, because torch checks strides, which a transposed matrix of one row does not have.
        by_row, by_column = a.scales.flatten().expand(rows), b.scales.flatten().expand(cols)
        scales = by_row.contiguous().view(rows, 1), by_column.contiguous().view(1, cols)
    return torch._scaled_mm(left, right, *scales, bias=bias, out_dtype=dtype, use_fast_accum=False)
