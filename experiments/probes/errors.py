"""Measure the errors that a recipe causes in gradients, and those of sums with few bits, as in tensor cores.

Of gradients: g is the exact gradient, ĝ_s the one with rounding seed s of S seeds, e_s = ĝ_s − g, ē the mean of e_s:

    norm          ‖g‖
    cosine        mean of ⟨ĝ_s, g⟩ / ‖ĝ_s‖‖g‖
    error         √(mean of ‖e_s‖²) / ‖g‖
    bias          ⟨ē, g⟩ / ⟨g, g⟩: how much longer ĝ is than g in the direction of g (0: equally long)
    mean_error    ‖ē‖ / ‖g‖: the error that remains after averaging over the S seeds
    noise         √(Σ ‖e_s − ē‖² / (S − 1)) / ‖g‖: the part of the error that changes with the seed; 0 for a recipe
                  without random numbers, NaN for a recipe with random numbers and S = 1
    systematic    √(mean_error² − noise² / S): the part of the error that averaging over any number of seeds would not
                  remove. The expression under the root is an unbiased estimate; if it is negative, 0 is used

Of sums (`fewbits probe --accumulators`): an accumulator (fewbits.kernels.accumulators) is a rule by which hardware adds
up products, such as `hopper-fp8`. The operands are those of the forward products of a recipe's quantized layers at a
checkpoint; only some of their rows are used. They are first rounded to the accumulator's input dtype, for FP8 with one
scale for each operand. The product is compared with the exact product of these rounded operands, so that the error
comes from the summation alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fewbits.common.from_dict import one_of
from fewbits.kernels.accumulators import ACCUMULATORS, product
from fewbits.kernels.formats import TABLE
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import QuantizedLinear, StepContext

SIDE = 64  # the largest number of rows of x and of w that are used; the product then has 64·64 = 4,096 elements
# The dtype to which the operands of an accumulator are rounded; all accumulators that are not listed here: E4M3.
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "hopper-bf16": torch.bfloat16, "fp32": torch.bfloat16}
# Accumulators of FP4 (kind `grouped`) and of integers need the scales of the operands, which a quantized layer does not
# store.
VALID = tuple(name for name, row in ACCUMULATORS.items() if row.kind in ("format", "fused"))


class GradientErrors:
    """Collects the gradients of one batch for several seeds, and computes the measures for any set of parameters.

    exact: the exact gradient by parameter name. random: whether the recipe uses random numbers.
    """

    def __init__(self, exact: Mapping[str, Tensor], *, random: bool) -> None:
        self._exact, self._random = exact, random
        self._norms = {name: _dot(g, g) for name, g in exact.items()}
        self._seeds: list[dict[str, tuple[Tensor, Tensor]]] = []  # for each seed and parameter: ⟨e, g⟩ and ⟨e, e⟩
        self._sums: dict[str, Tensor] = {}  # for each parameter: the sum of e over the seeds

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of one more seed, by parameter name. Call it once if the recipe uses no random numbers."""
        products = {}
        for name, g in self._exact.items():
            e = gradients[name].float() - g
            products[name] = _dot(e, g), _dot(e, e)
            if self._random:
                self._sums[name] = self._sums[name].add_(e) if name in self._sums else e
        self._seeds.append(products)

    def measures(self, names: Sequence[str]) -> dict[str, float]:
        """Return the measures of the module's docstring for the gradients of these parameters as one vector."""
        count = len(self._seeds)
        gg = _total(self._norms[name] for name in names)
        eg = [_total(products[name][0] for name in names) for products in self._seeds]
        ee = [_total(products[name][1] for name in names) for products in self._seeds]
        qq = [max(gg + 2 * along + square, 0.0) for along, square in zip(eg, ee, strict=True)]
        mean, variance = ee[0], math.nan if self._random else 0.0
        if count > 1:
            mean = _total(_dot(self._sums[name], self._sums[name]) for name in names) / count**2
            variance = max(sum(ee) - count * mean, 0.0) / (count - 1)
        norm = math.sqrt(gg)
        return {
            "norm": norm,
            "cosine": sum(_ratio(gg + a, math.sqrt(gg * q)) for a, q in zip(eg, qq, strict=True)) / count,
            "error": _ratio(math.sqrt(sum(ee) / count), norm),
            "bias": _ratio(sum(eg) / count, gg),
            "mean_error": _ratio(math.sqrt(mean), norm),
            "noise": _ratio(math.sqrt(variance), norm),
            "systematic": _ratio(math.sqrt(max(mean - variance / count, 0.0)), norm),
        }


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten().double(), b.flatten().double())


def _total(numbers: Iterable[Tensor]) -> float:
    return float(torch.stack(list(numbers)).sum())


def _ratio(a: float, b: float) -> float:
    """Return a / b; NaN if b is 0."""
    return a / b if b else math.nan


# ------------------------------------------------------------------------------------------------ sums


def check_accumulators(accumulators: Sequence[str]) -> None:
    """Raise ValueError if a name is not one of the accumulators that can be measured (VALID)."""
    for name in accumulators:
        if name in ACCUMULATORS and name not in VALID:
            needs = "needs operands with their scales, which a quantized layer does not store"
            raise ValueError(f"accumulator {name} {needs}: valid values are {', '.join(VALID)}")
        one_of("accumulator", name, VALID)


@torch.no_grad()
def sum_error(x: Tensor, w: Tensor, accumulator: str) -> float:
    """Return ‖p − e‖ / ‖e‖ of x · wᵀ for some rounded rows; p is summed by the accumulator, e is exact."""
    a, b = (_rounded(_sample(operand), accumulator) for operand in (x, w))
    exact = a.double() @ b.double().T
    off = product(a, b.T.contiguous(), accumulator).double() - exact
    return float(off.norm() / exact.norm())


@contextmanager
def measured_sums(quantization: Quantization, accumulators: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Measure the error of sums in each layer's forward product, in the forward passes inside a `with` block.

    Yield a list, to which each forward product of a quantized layer appends a row for each accumulator.
    """
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
    """Return x and w as the layer multiplies them in its forward pass, bit for bit; no statistics are recorded."""
    rows = x.reshape(-1, layer.in_features)
    quantized = layer.plans[context.switched].x.quantize_one(0, rows, lambda name: layer.seed(context, name))
    weight = layer.quantize_weight_for(0, context, rows.dtype, layer.sampler is not None)
    if not (isinstance(quantized, Tensor) and isinstance(weight, Tensor)):
        raise ValueError("--accumulators needs emulated products: probe the recipe without execute=fp8")
    return quantized, weight


def _sample(operand: Tensor) -> Tensor:
    """Return at most SIDE rows, spread evenly over the operand."""
    rows = operand.shape[0]
    return operand if rows <= SIDE else operand[torch.linspace(0, rows - 1, SIDE).long().to(operand.device)]


def _rounded(operand: Tensor, accumulator: str) -> Tensor:
    """Return the operand rounded to the accumulator's input dtype; for E4M3, it is first scaled to an amax of 448."""
    dtype = DTYPES.get(accumulator, torch.float8_e4m3fn)
    if dtype != torch.float8_e4m3fn:
        return operand.to(dtype)
    largest = TABLE["e4m3"].max
    amax = operand.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    return (operand.float() / amax * largest).clamp(-largest, largest).to(dtype)
