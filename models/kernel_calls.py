"""List the kernel calls of a quantized model's training step, so that these kernels can be compiled beforehand."""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial

import torch
from torch import Tensor

from fewbits.kernels.backends.protocol import ABSENT, COUNTS, OBSERVED
from fewbits.kernels.layers import activations, attention, cross_entropy, norms  # noqa: F401, they register operators
from fewbits.kernels.layers.library import takes
from fewbits.models.operand_pair import OperandPair
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import NOISE, QuantizedLinear

Call = Callable[[], object]


def calls_of(quantization: Quantization, tokens: int, dtype: torch.dtype) -> Iterator[Call]:
    """Yield functions without arguments that together make every kind of kernel call of a training step.

    Pass the functions to `kernels_of`, which returns the kernels to compile before training. The functions call the
    kernels on uninitialised tensors that have the shapes of the layers' inputs, weights and output gradients. The
    layers themselves may be on the meta device.
    tokens: the number of tokens of a micro-batch. dtype: the dtype in which the layers compute.
    """
    seen = set()
    for layer in quantization.layers:
        out, inner = layer.shape
        for plan in layer.plans:
            for pair, shape in ((plan.x, (tokens, inner)), (plan.w, (out, inner)), (plan.dy, (tokens, out))):
                if (pair, shape) not in seen:
                    seen.add((pair, shape))
                    yield from _calls_of_pair(pair, torch.empty(shape, dtype=dtype))
            for gemm, shape in (("dgrad", (tokens, inner)), ("wgrad", (out, inner))):
                yield partial(plan.rotate_back, gemm, torch.empty(shape, dtype=layer.output or dtype), _seed)
        if layer.sampler is not None:
            yield from _calls_of_sampler(layer, dtype)
    yield from _calls_around_layers(dtype)


def _calls_of_pair(pair: OperandPair, x: Tensor) -> Iterator[Call]:
    pair = copy(pair)
    pair.scales = None  # the calls must not change the state of delayed scales
    for watch in (False, True):
        yield partial(pair, x, _seed, [], watch=watch)
        for which in (0, 1):
            yield partial(pair.quantize_one, which, x, _seed, [], watch=watch)


def _calls_around_layers(dtype: torch.dtype) -> Iterator[Call]:
    """Yield the calls of norms, activations, rotations and cross entropy, whose kernels depend only on the dtype."""
    ops, x, w = torch.ops.fewbits, torch.empty(1, 8, dtype=dtype), torch.empty(8)
    counts = torch.zeros(1, COUNTS, dtype=torch.int64)
    yield partial(ops.observe, torch.zeros(1, OBSERVED, dtype=torch.int64), [counts], [ABSENT], [0])
    if not takes(x):
        return
    for source in (x, x.float()):  # Mamba-2 has norms of FP32 tensors
        yield partial(ops.norm, source, w, None, 0.0, 1e-5, True, dtype)
        yield partial(ops.norm_backward, source, None, x, w, True, w[:1], w[:1], 0.0, True)
    yield partial(ops.cross_entropy, x, w[:1].long(), 0, False)
    yield partial(ops.cross_entropy_backward, x, w[:1].long(), w[:1], w[:1], 0)
    for name, operands in (("squared_relu", 1), ("gelu", 1), ("swiglu", 2)):
        yield partial(getattr(ops, name), *[x] * operands)
        yield partial(getattr(ops, f"{name}_backward"), *[x] * (operands + 1))
    yield partial(ops.rotated, x.view(1, 1, 1, 8), 1, 0, torch.empty(1, 4, 2))


def _calls_of_sampler(layer: QuantizedLinear, dtype: torch.dtype) -> Iterator[Call]:
    assert layer.sampler is not None
    assert layer.bit_scale is not None
    noise, block = NOISE[layer.sampler.kind], layer.sampler.block
    w, bits = torch.empty(layer.shape, dtype=layer.matrix.dtype), torch.empty(layer.bit_scale.shape)
    yield partial(torch.ops.fewbits.sample_weight, w, bits, 0, noise, block, dtype)
    for gradient in (dtype, torch.float32):
        grad = torch.empty(w.shape, dtype=gradient)
        yield partial(torch.ops.fewbits.sample_weight_backward, grad, w, bits, 0, noise, block)


def _seed(name: str) -> int:
    return 0
