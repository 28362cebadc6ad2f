"""Measure what the sums of tensor cores would cost in a checkpoint's forward products (`fewbits probe --accumulators`).

The operands are those of a recipe's quantized layers, a sample of their rows. They are rounded to a dtype of the
accumulator first, FP8 with one scale for each operand, and the products are compared with exact sums of these rounded
operands: so an error is that of the sum alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fewbits.common.from_dict import one_of
from fewbits.kernels.accumulators import ACCUMULATORS, product
from fewbits.kernels.formats import TABLE
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import QuantizedLinear, StepContext

SIDE = 64  # at most so many rows of x and of w, which gives 4,096 results
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "hopper-bf16": torch.bfloat16, "fp32": torch.bfloat16}
# Operands of the tensor cores for FP4 need the scales of their blocks, which a quantized layer does not keep.
VALID = tuple(name for name, row in ACCUMULATORS.items() if row.kind != "grouped")


def check(accumulators: Sequence[str]) -> None:
    """Raise ValueError for an accumulator that cannot be measured."""
    for name in accumulators:
        one_of("accumulator", name, VALID)


@torch.no_grad()
def sum_error(x: Tensor, w: Tensor, accumulator: str) -> float:
    """Return the root mean square error of x · wᵀ with this accumulator, relative to the exact results."""
    a, b = (_rounded(_sample(operand), accumulator) for operand in (x, w))
    exact = a.double() @ b.double().T
    off = product(a, b.T.contiguous(), accumulator).double() - exact
    return float(off.norm() / exact.norm())


@contextmanager
def measured(quantization: Quantization, accumulators: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Measure the forward products of all layers while the context is open; the list has a row for each of them."""
    rows: list[dict[str, Any]] = []

    def measure(layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, QuantizedLinear)
        x, w = _operands(layer, inputs[0], quantization.context)
        labels = {"layer": layer.name, "block": layer.block, "part": layer.part}
        rows.extend(labels | {"accumulator": name, "error": sum_error(x, w, name)} for name in accumulators)

    hooks = [layer.register_forward_pre_hook(measure) for layer in quantization.layers if accumulators]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _operands(layer: QuantizedLinear, x: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    """Return the quantized operands of a layer's forward product, with its bits, and record no statistics."""
    rows = x.reshape(-1, layer.in_features)
    quantized = layer.plans[context.switched].x.quantize_one(0, rows, lambda name: layer.seed(context, name))
    weight = layer.quantize_weight_for(0, context, rows.dtype, layer.sampler is not None)
    if not (isinstance(quantized, Tensor) and isinstance(weight, Tensor)):
        raise ValueError("--accumulators adds emulated products: probe the recipe without execute=fp8")
    return quantized, weight


def _sample(operand: Tensor) -> Tensor:
    """Return rows that are spread evenly over the operand."""
    rows = operand.shape[0]
    return operand if rows <= SIDE else operand[torch.linspace(0, rows - 1, SIDE).long().to(operand.device)]


def _rounded(operand: Tensor, accumulator: str) -> Tensor:
    dtype = DTYPES.get(accumulator, torch.float8_e4m3fn)
    if dtype != torch.float8_e4m3fn:
        return operand.to(dtype)
    largest = TABLE["e4m3"].max
    amax = operand.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    return (operand.float() / amax * largest).clamp(-largest, largest).to(dtype)
