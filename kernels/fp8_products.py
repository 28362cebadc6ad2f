"""Multiply matrices in FP8: the product takes codes and scales, so the operands are not first rounded to BF16.

    y[m, n] = (Σ_k A[m, k] · B[k, n]) · a[m] · b[n]

A and B are E4M3 codes; a and b are FP32 scales, one for the whole matrix, or one per row of A and per column of B.
`encode` stores the factor s that maps a block to the format's range, so the scale of its codes is 1/s.

The emulation (`execute: emulate`) rounds code/s to BF16 and then multiplies. So its result differs from y by the order
of the FP32 sums, by the last rounding, and by the rounding of the operands to BF16. Rounding the operands changes a
result by at most (2u + u²) Σ |A·a| |B·b|, where u = 2^-8 is the largest relative error of rounding to BF16.

On GPUs the tensor cores compute the sum, possibly with fewer bits than FP32 (accumulators.py). On CPUs the codes are
widened to BF16, which contains all E4M3 values, and `matmul_fp32` sums their products in FP32. Torch's FP8 product for
CPUs computes the same sums, but takes a hundred times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fewbits.kernels import ops  # noqa: F401, registers the operators
from fewbits.kernels.operators import call
from fewbits.kernels.products import matmul_fp32
from fewbits.kernels.quantizer import Mixture, Quantizer

MULTIPLE = 16  # FP8 products of GPUs need K (the length of the sums) and N (the columns of y) to be multiples of this
VALID = "e4m3 with block tensor or channel and scaling amax"


class Fp8Operand(NamedTuple):
    """A matrix of E4M3 codes with its scales: a single scale, one for each row, or one for each column.

    An element of the matrix is the value of its code, times its scale.
    """

    codes: Tensor  # float8_e4m3fn
    scales: Tensor  # float32 [1, 1], [rows, 1] or [1, columns]

    def t(self) -> Fp8Operand:
        return Fp8Operand(self.codes.t(), self.scales.t())


def is_executable(spec: Quantizer | Mixture | None) -> bool:
    """Tell whether FP8 products can use the codes of this quantizer.

    They can if its format is e4m3, its block is tensor or channel, and its scaling is amax. The result is False for a
    mixture and for None.
    """
    if not isinstance(spec, Quantizer):
        return False
    return (spec.format.name, spec.scaling) == ("e4m3", "amax") and str(spec.block) in ("tensor", "channel")


def encode_fp8(x: Tensor, spec: str, axis: int, seed: int) -> Fp8Operand:
    """Return the codes and scales of x, quantized by `spec`.

    spec: the string form of a quantizer for which `is_executable` is true. axis: the dimension along which a `channel`
    block lies, −1 or 0. seed: the seed of stochastic rounding.
    """
    codes, factors, _ = call(torch.ops.fewbits.encode, x, spec, axis, seed)
    return Fp8Operand(codes.view(torch.float8_e4m3fn), factors.reciprocal())


def scaled_product(a: Fp8Operand, b: Fp8Operand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return a · b + bias in dtype; the result is rounded once, after scales and bias are applied to the sum.

    a has one scale or one per row, b has one scale or one per column. A GPU multiplies without a copy if the codes of a
    are contiguous along rows, and those of b along columns; other layouts are copied first.
    """
    rows, inner, cols = *a.codes.shape, b.codes.shape[1]
    if inner % MULTIPLE or cols % MULTIPLE:
        raise ValueError(
            f"cannot multiply {rows}x{inner} and {inner}x{cols} in FP8: both sizes of the second matrix must be "
            f"multiples of {MULTIPLE}"
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
        # Flattened first, because torch checks strides, and a transposed matrix of one row has other strides.
        by_row, by_column = a.scales.flatten().expand(rows), b.scales.flatten().expand(cols)
        scales = by_row.contiguous().view(rows, 1), by_column.contiguous().view(1, cols)
    return torch._scaled_mm(left, right, *scales, bias=bias, out_dtype=dtype, use_fast_accum=False)
