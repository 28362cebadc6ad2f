"""Helpers for the tests of quantization: build small quantized layers and models, train them, record kernel calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import build
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import SLOTS, Recipe

torch.set_num_threads(1)

E4M3 = "e4m3:1x16:amax"
MIXED = "e4m3:16x16:gam @ error<0.06 | bf16 ; per=block"
NVFP4 = {
    "fprop": {"x": "e2m1:1x16:nvfp4", "w": "e2m1:16x16:nvfp4"},
    "dgrad": {"dy": "e2m1:1x16:nvfp4:stochastic", "w": "e2m1:16x16:nvfp4"},
    "wgrad": {"dy": "e2m1:1x16:nvfp4:stochastic:rht16", "x": "e2m1:1x16:nvfp4:rht16", "output": "fp32"},
}


def recipe(*texts: str, output: str = "bf16", **others: Any) -> Recipe:
    """Build a recipe from the quantizers of the six slots, in the order of SLOTS, or from one quantizer for all slots.

    output: `wgrad.output`. others: further fields of the recipe.
    """
    named = dict(zip(SLOTS, texts * 6 if len(texts) == 1 else texts, strict=True))
    gemms: dict[str, dict[str, str]] = {"fprop": {}, "dgrad": {}, "wgrad": {"output": output}}
    for slot, text in named.items():
        gemm, _, operand = slot.partition(".")
        gemms[gemm][operand] = text
    return Recipe.from_dict({**gemms, **others})


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def noisy(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values of many magnitudes, larger in later columns, so that mixtures choose different quantizers."""
    g = torch.Generator().manual_seed(seed)
    magnitudes = torch.randn(*shape, generator=g) * torch.linspace(0.5, 5, shape[-1])
    return (torch.randn(*shape, generator=g) * magnitudes.exp()).to(dtype)


def linear(
    inner: int, out: int, *, bias: bool = False, seed: int = 0, draw: Callable[..., Tensor] = normal
) -> nn.Linear:
    layer = nn.Linear(inner, out, bias=bias)
    with torch.no_grad():
        layer.weight.copy_(draw(out, inner, seed=seed))
        if bias:
            layer.bias.copy_(draw(out, seed=seed + 1))
    return layer


def one_layer(
    spec: Recipe, inner: int, out: int, *, bias: bool = False, seed: int = 0
) -> tuple[QuantizedLinear, Quantization]:
    """Build and quantize a model of one linear layer, whose weight has values of many magnitudes (`noisy`)."""
    quantization = quantize(nn.Sequential(linear(inner, out, bias=bias, draw=noisy)), spec, seed=seed)
    return quantization.layers[0], quantization


def tiny(name: str, *, seed: int = 1, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Decoder:
    """Build the model `NAME-nano` with smaller sizes. changes: further fields of DecoderConfig."""
    sizes = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "ffn": 96, "context": 64}
    return build(replace(MODELS[f"{name}-nano"], **{**sizes, **changes}), seed=seed, compute_dtype=dtype)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def train(
    model: Decoder,
    quantization: Quantization | None,
    *,
    steps: int = 3,
    micro_batches: int = 2,
    evaluate: bool = False,
    switch_from: float = 0.0,
) -> list[Tensor]:
    """Train and return, step by step, the loss of each micro-batch and then the gradients of all parameters.

    evaluate: also evaluate the model before each micro-batch and after each update. switch_from: a fraction to add to
    the progress of training.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Tensor] = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            if quantization is not None:
                quantization.begin(step, micro_batch, progress=step / steps + switch_from)
            if evaluate:
                look(model)
            loss = model.loss(*batch(step * micro_batches + micro_batch))
            loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if evaluate:
            look(model)
    return seen


def look(model: Decoder) -> float:
    """Evaluate the model and return its loss on a batch that training does not use."""
    model.eval()
    with torch.no_grad():
        loss = float(model.loss(*batch(99)))
    model.train()
    return loss


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


class Calls(TorchDispatchMode):
    """Records kernel calls inside a `with` block, as (operator's name, shape of its input, its other arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...], tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fewbits":
            self.made.append((func._opname, tuple(args[0].shape), args[1:]))
        return func(*args, **(kwargs or {}))

    def of(self, *shape: int) -> list[str]:
        """Return the names of the operators that were called on inputs of this shape."""
        return [name for name, size, _ in self.made if size == shape]
