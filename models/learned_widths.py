"""Cast sampled weights to the formats that their learned bit widths allow (GaussWS, Proposition 3 and Table C.1).

Each square block of weights has learned one bit width b. The square is cast to a format with ceil(log2(b + 3)) exponent
bits and b - 2 mantissa bits, where b is rounded up to a whole number. The scale of a square maps its largest magnitude
to the format's maximum, because Proposition 3 counts binades from this magnitude downwards. Squares with b > 12 keep
their FP32 weights: they need 11 or more mantissa bits, more than FP16 has, and Table C.1 gives FP32 for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fewbits.kernels.api import fake_quantize
from fewbits.models.networks.partition import fill, is_sharded, local, whole
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import QuantizedLinear

NARROWEST, WIDEST = 3, 13  # the first and the last bit width of Table C.1; the format of the last one is FP32


def format_of_width(bits: int) -> str:
    """Return the format of sampled weights with a bit width from 3 to 12, for example `e3m2` for the width 4."""
    if not NARROWEST <= bits < WIDEST:
        raise ValueError(f"bit width {bits}: valid values are {NARROWEST} to {WIDEST - 1} (GaussWS Table C.1)")
    return f"e{math.ceil(math.log2(bits + 3))}m{bits - 2}"


def sampled_layers(quantization: Quantization) -> Iterator[QuantizedLinear]:
    """Yield the layers whose weights have a sampler's noise and learned bit widths."""
    return (layer for layer in quantization.layers if layer.sampler is not None)


def cast(weight: Tensor, bits: Tensor, block: int) -> Tensor:
    """Return the weight, with each square of `block` × `block` values cast to the format of its bit width.

    bits: the bit width of each square, [squares along out, squares along in]. This function rounds the bit widths up
    and clamps them to 3 … 13. It does not cast squares whose bit width is then 13.
    """
    whole = bits.ceil().clamp(NARROWEST, WIDEST)
    rows, columns = weight.shape
    widths = whole.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    result = weight.clone()
    for width in map(int, whole.unique().tolist()):
        if width < WIDEST:
            quantized = fake_quantize(weight, f"{format_of_width(width)}:{block}x{block}:amax")
            result = torch.where(widths == width, quantized, result)
    return result


@contextmanager
def weights_cast(quantization: Quantization, width: int | None = None) -> Iterator[None]:
    """Cast the weights that have a sampler to the formats of their bit widths, for evaluation in a `with` block.

    The weights are restored when the block ends.

    width: one bit width for all weights; None: each square block of weights gets the width that it has learned.
    """
    layers = list(sampled_layers(quantization))
    saved = [layer.matrix.detach().clone() for layer in layers]
    try:
        for layer in layers:
            bits, sampler = layer.bits, layer.sampler
            assert bits is not None
            assert sampler is not None
            bits = whole(bits.detach())
            widths = bits if width is None else torch.full_like(bits, width)
            _set(layer, cast(whole(layer.matrix.detach()), widths, sampler.block))
        yield
    finally:
        for layer, weight in zip(layers, saved, strict=True):
            _set(layer, weight)


@torch.no_grad()
def _set(layer: QuantizedLinear, weight: Tensor) -> None:
    """Overwrite a layer's weight in place, because fully_shard gathers a sharded one from its memory."""
    if not is_sharded(layer.matrix):
        layer.matrix.copy_(weight)
    elif is_sharded(weight):
        local(layer.matrix).copy_(local(weight))
    else:
        fill(layer.matrix.data, weight)
