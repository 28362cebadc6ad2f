"""Check claim N19: with square blocks, forward and backward pass multiply by the same quantized weights.

A model is trained for some steps, while a torch dispatch mode records the second operand of every GEMM inside a
quantized layer: wᵀ of y = x·wᵀ in the forward pass, and w of dx = dy·w in the backward pass. These are the tensors that
the GEMMs read, after all caches, casts and views; nothing is computed again for the check.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.experiments.config import load_recipe
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.quantizer import Quantizer
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build
from fewbits.models.quantize import quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import Recipe

BATCH, LENGTH = 2, 48  # no side of a weight is 2 · 48 long, so the shape tells weights and activations apart
STEPS, MICRO_BATCHES = 2, 2
GEMMS = ("aten::mm", "aten::addmm", "fewbits::matmul_fp32")


class Read(NamedTuple):
    """A layer's quantized weight as its GEMMs read it in both passes of a micro-batch, and its FP32 master weight."""

    forward: Tensor
    backward: Tensor
    master: Tensor


class Consistency(NamedTuple):
    """A comparison of the weights that the forward and the backward pass read, once for each layer and micro-batch."""

    reads: int  # the number of comparisons
    same: int  # those with the same bits in both passes
    quantized: int  # those whose forward weight is the kernel's quantization of the master weight in BF16
    apart: float  # the greatest ‖forward − backward‖ / ‖master‖


class _Watch(TorchDispatchMode):
    """A torch dispatch mode that records in `reads` the weights that GEMMs in the forward and backward pass read."""

    def __init__(self, layers: Sequence[QuantizedLinear]) -> None:
        super().__init__()
        self.at: tuple[QuantizedLinear, bool] | None = None  # the layer, and whether its backward pass runs
        self.reads: list[Read] = []
        self._forward: dict[str, Tensor] = {}
        for layer in layers:
            layer.register_forward_pre_hook(partial(self._enter, False))
            layer.register_forward_hook(self._leave)
            layer.register_full_backward_pre_hook(partial(self._enter, True))
            layer.register_full_backward_hook(self._leave)

    def _enter(self, backward: bool, layer: Any, _: Any) -> None:
        self.at = layer, backward

    def _leave(self, *_: Any) -> None:
        self.at = None

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if self.at is not None and func._schema.name in GEMMS:
            (layer, backward), operand = self.at, args[-1]
            if not backward:
                self._forward[layer.name] = operand.t().clone()
            elif operand.shape == layer.weight.shape:  # otherwise the operand is the activation in Wgrad
                self.reads.append(Read(self._forward.pop(layer.name), operand.clone(), layer.weight.detach().clone()))
        return func(*args, **(kwargs or {}))


def weights_read(recipe: Recipe, model: str, *, autocast: bool) -> list[Read]:
    """Train a preset, with torch's autocast or as trials do; return a `Read` for each layer and micro-batch."""
    torch.manual_seed(0)
    decoder = build(MODELS[model], seed=0, compute_dtype=torch.float32 if autocast else torch.bfloat16)
    quantization = quantize(decoder, recipe, seed=0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3)
    quantization.attach(decoder, optimizer)
    watch = _Watch([layer for layer in quantization.layers if layer.name not in quantization.kept])
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            tokens = torch.randint(0, decoder.config.vocab, (BATCH, LENGTH + 1))
            with watch, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                decoder.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return watch.reads


@cache
def consistency(weights: str) -> Consistency:
    """Train a small transformer and a hybrid with these blocks of weights, and compare what the passes read."""
    recipe, spec = load_recipe("nvfp4", {"weights": weights}), Quantizer.parse(f"e2m1:{weights}:nvfp4")
    runs = (("nemotron-nano", True), ("nemotron-nano", False), ("hybrid-nano", False))
    reads = [read for model, autocast in runs for read in weights_read(recipe, model, autocast=autocast)]
    same = [torch.equal(read.forward.view(torch.int16), read.backward.view(torch.int16)) for read in reads]
    quantized = [torch.equal(read.forward, fake_quantize(read.master.bfloat16(), spec)) for read in reads]
    norm = torch.linalg.vector_norm
    apart = [norm(r.forward.double() - r.backward.double()) / norm(r.master.double()) for r in reads]
    return Consistency(len(reads), sum(same), sum(quantized), float(max(apart)))


@exact("nvfp4", "N19")
def n19() -> Exact:
    squares, rows = consistency("16x16"), consistency("1x16")
    holds = squares.same == squares.reads == squares.quantized and rows.same == 0 and rows.quantized == rows.reads
    what = (
        f"in {STEPS} training steps, with and without autocast, of small models of both families, both passes read the "
        f"same bits of {squares.same} of {squares.reads} weights in 16×16 blocks and of {rows.same} of {rows.reads} "
        "weights in 1×16 blocks"
    )
    note = f"in 1×16 blocks the passes' weights differ by up to {rows.apart:.1%} of the weight's norm"
    return Exact(
        holds,
        what,
        (note, "these are the operands of the GEMMs in training, not results of a kernel called for the check"),
    )
