"""Multiply quantized matrices by torch's scaled products, which read codes and scales: FP8, MXFP8 and NVFP4.

    y[m, n] = (Σ_k A[m, k] · a[m, k] · B[n, k] · b[n, k]) · a' · b'

A and B are codes and a and b the scales of their blocks, from `encode_operands`; a' and b' are NVFP4's FP32 scales of
whole tensors, which torch multiplies in as the product's factor (in FP8, a and b of whole rows and tensors are taken
out of the sum in the same way). Stochastic rounding and Hadamard transforms are part of the encoding. Codes lie along
the sum, so that torch multiplies without a copy: an operand along axis 0 is stored transposed.

The emulation (`execute: emulate`) rounds every operand's values to BF16 and then multiplies. MXFP8's values have no
rounding error, so the result differs from y only by the order of the FP32 sums and by the last rounding. FP8 and NVFP4
have FP32 scales: rounding the operands changes a result by at most (2u + u²) Σ |A·a·a'| |B·b·b'|, where u = 2^-8 is the
largest relative error of rounding to BF16.

On GPUs the tensor cores compute the sum, possibly with fewer bits than FP32 (accumulators.py). On CPUs the codes are
decoded, and `matmul_fp32` sums their products in FP32: the same product, at no gain of speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product, starmap
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels import ops  # noqa: F401, registers the operators
from fewbits.kernels.formats import TABLE
from fewbits.kernels.operators import call
from fewbits.kernels.packing import swizzle, unpack
from fewbits.kernels.products import matmul_fp32
from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.kernels.reference.elements import values_of

MULTIPLE: Final = 16  # the columns of a product must be a multiple of this
FP8_SINCE: Final = (8, 9)  # the compute capability of the first GPUs with FP8 products
FP8, MXFP8, MXFP4, NVFP4 = "fp8", "mxfp8", "mxfp4", "nvfp4"
Capability = tuple[int, int]  # the compute capability of a GPU


@dataclass(frozen=True)
class Form:
    """How an operand is quantized and stored: the quantizers, and the arguments by which torch is told.

    kind: FP8, MXFP8, MXFP4 or NVFP4. element, scale: the dtypes of codes and scales. quantizers: the valid quantizers
    without their options. scaling: the name of torch's ScalingType of the block scales. width: the elements of a block
    along the sum (0: all). multiple: what the length of the sum must be a multiple of.
    """

    kind: str
    element: torch.dtype
    scale: torch.dtype
    quantizers: tuple[str, ...]
    scaling: str
    width: int
    multiple: int


def _each(format_: str, blocks: str, scalings: str) -> tuple[str, ...]:
    return tuple(f"{format_}:{block}:{name}" for block, name in product(blocks.split(), scalings.split()))


_E4M3, _E2M1, _FP32 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.float32
_E8M0, _NV = torch.float8_e8m0fnu, (*_each("e2m1", "1x16 16x16", "nvfp4 fouroversix"), "e2m1:1x16:eden")
FORMS: Final = {
    "tensor": Form(FP8, _E4M3, _FP32, ("e4m3:tensor:amax",), "TensorWise", 0, 16),
    "channel": Form(FP8, _E4M3, _FP32, ("e4m3:channel:amax",), "RowWise", 0, 16),
    "1x128": Form(FP8, _E4M3, _FP32, ("e4m3:1x128:amax",), "BlockWise1x128", 128, 128),
    "128x128": Form(FP8, _E4M3, _FP32, ("e4m3:128x128:amax",), "BlockWise128x128", 128, 128),
    MXFP8: Form(MXFP8, _E4M3, _E8M0, _each("e4m3", "1x32 32x32", "e8m0 mx"), "BlockWise1x32", 32, 32),
    MXFP4: Form(MXFP4, _E2M1, _E8M0, _each("e2m1", "1x32 32x32", "e8m0 mx"), "BlockWise1x32", 32, 32),
    NVFP4: Form(NVFP4, _E2M1, _E4M3, _NV, "BlockWise1x16", 16, 32),
}
_FORM_OF: Final = {text: name for name, form in FORMS.items() for text in form.quantizers}


# The forms of two operands, and the GPUs on which torch multiplies them, by major compute capability (8: 8.9 alone).
# cuBLAS has scales of 128 elements on Hopper only, scales of rows not on sm_120, and MX and NV formats on Blackwell.
GPUS: Final[dict[tuple[str, str], tuple[int, ...]]] = {
    ("tensor", "tensor"): (8, 9, 10, 12),
    **dict.fromkeys([("channel", "channel"), ("channel", "tensor"), ("tensor", "channel")], (8, 9, 10)),
    **dict.fromkeys([("1x128", "128x128"), ("128x128", "1x128"), ("1x128", "1x128")], (9,)),
    **dict.fromkeys([(MXFP8, MXFP8), (NVFP4, NVFP4)], (10, 12)),
}


class ScaledOperand(NamedTuple):
    """An operand of a scaled product: a tensor as codes and scales, laid out as packing.py says.

    codes: uint8 [lines, bytes]; the codes of a line lie along the sum. scales: one per block, FP32 or uint8.
    tensor_scale: FP32 [1] for NVFP4, otherwise empty. form: a key of FORMS.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor
    form: str

    @property
    def length(self) -> int:
        return self.codes.shape[1] * (2 if FORMS[self.form].element is _E2M1 else 1)

    def decode(self) -> Tensor:
        """Return the values of the operand, [lines, length], in FP32."""
        values, factor = self.factored()
        return values.float() * factor

    def factored(self) -> tuple[Tensor, Tensor]:
        """Return (values, factor), whose product is the operand: BF16 [lines, length] and FP32 [lines, 1] or [1, 1].

        The values are exact in BF16, except of blocks of 128 elements, whose values are in FP32.
        """
        form, lines = FORMS[self.form], len(self.codes)
        if form.element is _E2M1:
            values = values_of(unpack(self.codes, 4, self.length), TABLE["e2m1"])
        else:
            values = self.codes.view(_E4M3).float()
        if form.multiple == 16:
            return values.bfloat16(), self.scales.view(-1, 1)
        if form.scale is _FP32:
            tall = 128 if self.form == "128x128" else 1
            scales = self.scales.repeat_interleave(tall, 0)[:lines] if tall > 1 else self.scales.t()
        else:
            places = swizzle(lines, -(-self.length // form.width), self.scales.device)
            scales = self.scales.flatten()[places].view(form.scale).float()
        values *= scales.repeat_interleave(form.width, 1)[:, : self.length]
        whole = self.tensor_scale.view(1, 1) if self.tensor_scale.numel() else values.new_ones((1, 1))
        return values if form.scale is _FP32 else values.bfloat16(), whole


def form_of(spec: Quantizer | Mixture | None) -> str | None:
    """Return the form (a key of FORMS) of what a quantizer encodes, or None if scaled products cannot read it."""
    if not isinstance(spec, Quantizer) or spec.group != "tensor" or (spec.factor != 1 and not spec.traits.target):
        return None
    return _FORM_OF.get(f"{spec.format}:{spec.block}:{spec.scaling}")


def encode_operands(x: Tensor, *of: tuple[str, int, int]) -> tuple[ScaledOperand, ...]:
    """Return the operands that the matrix x gives for one or two quantizers, encoded in one pass over x.

    of: for each operand the string form of a quantizer that has a form (`form_of`); the axis along which blocks lie and
    over which its product sums, −1 or 0; and the seed of stochastic rounding.
    """
    specs, axes, seeds = zip(*of, strict=True)
    flat = call(torch.ops.fewbits.encode_operands, x, list(specs), list(axes), list(seeds))
    forms = [form_of(Quantizer.parse(spec)) for spec in specs]
    return tuple(starmap(ScaledOperand, zip(flat[::3], flat[1::3], flat[2::3], map(str, forms), strict=True)))


def scaled_product(a: ScaledOperand, b: ScaledOperand, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return a · bᵀ + bias in dtype; the result is rounded once, after scales and bias are applied to the sum."""
    (lines, columns), multiple = (len(a.codes), len(b.codes)), max(FORMS[a.form].multiple, FORMS[b.form].multiple)
    if a.length % multiple or columns % MULTIPLE:
        raise ValueError(
            f"cannot multiply {lines}x{a.length} and {b.length}x{columns} as {a.form} and {b.form}: of the second "
            f"matrix, the rows must be a multiple of {multiple} and the columns of {MULTIPLE}"
        )
    if a.codes.device.type == "cpu":
        (values, factor), (other, its_factor) = a.factored(), b.factored()
        exact = values.dtype == other.dtype == torch.bfloat16
        y = matmul_fp32(values, other.t()) if exact else values.float() @ other.float().t()
        whole = factor.numel() == its_factor.numel() == 1
        y = y * (factor * its_factor) if whole else y * factor * its_factor.t()
        return (y if bias is None else y + bias).to(dtype)
    if a.form == "1x128" and lines % 4:  # cuBLAS needs strides of 16 bytes between scales
        padded = a._replace(codes=F.pad(a.codes, (0, 0, 0, -lines % 4)), scales=F.pad(a.scales, (0, -lines % 4)))
        return scaled_product(padded, b, dtype, bias)[:lines]
    by_rows = "channel" in (a.form, b.form)
    left, right = a.codes.view(FORMS[a.form].element), b.codes.view(FORMS[b.form].element).t()
    (scale_a, recipe_a, swizzle_a), (scale_b, recipe_b, swizzle_b) = _scales(a, by_rows), _scales(b, by_rows)
    if by_rows:
        scale_b = scale_b.view(1, -1)
    multiply = partial(F.scaled_mm, left, right, output_dtype=dtype)
    if dtype == torch.float32 and by_rows and not _rows_in_fp32(left.device):
        one = torch.ones((), device=left.device), F.ScalingType.TensorWise
        y = multiply(*one, *one).mul_(scale_a).mul_(scale_b)
    else:
        fused = None if dtype == torch.float32 else bias  # torch adds no bias to an FP32 result
        y = multiply(scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, bias=fused)
    return y + bias if bias is not None and dtype == torch.float32 else y


def _scales(operand: ScaledOperand, by_rows: bool) -> tuple[Any, Any, Any]:
    """Return torch's arguments scale, scaling recipe and swizzle for an operand; by_rows: one scale for each line."""
    types, swizzles, form = F.ScalingType, F.SwizzleType, FORMS[operand.form]
    if by_rows:
        scales = operand.scales.flatten().expand(len(operand.codes)).contiguous()
        return scales.view(-1, 1), types.RowWise, None
    recipe = getattr(types, form.scaling)
    if form.scale is _FP32:
        return operand.scales.view(()) if operand.form == "tensor" else operand.scales.t(), recipe, None
    scales, swizzle = operand.scales.flatten().view(form.scale), swizzles.SWIZZLE_32_4_4
    if not operand.tensor_scale.numel():
        return scales, recipe, swizzle
    second = operand.tensor_scale.view(())
    return [scales, second], [recipe, types.TensorWise], [swizzle, swizzles.NO_SWIZZLE]


def _rows_in_fp32(device: torch.device) -> bool:
    """Tell whether torch has FP32 results of FP8 products with scales of rows: those of cuBLAS 12.9 on Hopper."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return device.type == "meta" or (torch.cuda.get_device_capability(device)[0] == 9 and version >= (12, 9))
