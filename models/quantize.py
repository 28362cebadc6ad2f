"""Replace the linear layers of any module by quantized ones, whose operands a recipe defines.

Every nn.Linear inside the module's blocks is replaced. The blocks are the items of the outermost nn.ModuleList or
nn.Sequential, or of an outermost nn.ModuleDict whose keys are numbers; an item's position there, from 0, is its block
number. Linear layers outside the blocks (an output head, a router before the blocks) stay unchanged, as do the matrix
products inside nn.MultiheadAttention. A module without blocks counts as one block. A layer's part (qkv, out, up, down,
in) is its attribute `part`; without this attribute, PART_OF_NAME gives the part for the module names of common models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fewbits.models.execution import check_execution, executed_gemms
from fewbits.models.networks.layers import Linear
from fewbits.models.observer import Observer
from fewbits.models.quantized_linear import BlockLinear, Plan, QuantizedLinear, Shared, StepContext
from fewbits.models.recipe import PARTS, Operands, Recipe, parts

# The last one or two components of a linear layer's module name: its part. The names are those of Hugging Face's,
# torchtitan's and nanoGPT's models.
PART_OF_NAME = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "wq", "wk", "wv", "query_key_value"), "qkv"),
    **dict.fromkeys(("o_proj", "wo", "out_proj", "attn.c_proj", "attention.dense"), "out"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "c_fc", "fc1", "dense_h_to_4h"), "up"),
    **dict.fromkeys(("down_proj", "w2", "fc2", "mlp.c_proj", "dense_4h_to_h"), "down"),
    "in_proj": "in",
}


@dataclass(repr=False)
class Quantization(Shared):
    """The quantized layers of one model, and the state that they share: recipe, position in training, observer.

    A training loop calls `begin(step, micro_batch)` before every forward pass. Seeds depend on step and micro-batch, so
    a repeated step gets the same noise. Alternatively, the loop calls `attach` once, which installs hooks that count
    the optimizer's updates and the model's forward passes.
    """

    observer: Observer | None = None
    layers: list[QuantizedLinear] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # names of the layers that the recipe's `keep` selects

    def __repr__(self) -> str:
        return f"<{self.recipe.name} on {len(self.layers)} linear layers, {len(self.kept)} of them kept high>"

    def begin(self, step: int, micro_batch: int = 0, *, rank: int = 0, progress: float = 0.0) -> None:
        """Set the step context (the position in training) of the following forward passes.

        step, micro_batch, rank: numbers from 0, on which the seeds of random numbers depend.
        progress: the fraction of training that is done, 0 to 1. If it is at least the recipe's `switch.at`, the layers
            use the recipe's quantizers for the time after the switch.
        """
        switched = self.recipe.switches and progress >= self.recipe.switch.at
        self.context = StepContext(step, micro_batch, rank, switched)
        self.last_input = None
        self.recorded.clear()
        if self.observer is not None:
            self.watching = self.observer.watches(step)
            self.watching_gradients = self.observer.watches_gradients(step) and micro_batch == 0

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int | None = None) -> None:
        """Install hooks that call `begin`, so that the training loop need not call it.

        The optimizer's updates are counted as steps, and the forward passes of training between them as micro-batches.
        steps: the number of steps of the whole training; required if the recipe switches during training.
        """
        if steps is None and self.recipe.switches:
            raise ValueError(
                f"recipe {self.recipe.name} switches at {self.recipe.switch.at} of training: pass steps= to attach, "
                "or call begin(step, progress=…) yourself"
            )
        step, micro_batch, rank = self.context.step, -1, self.context.rank

        def forward(*_: object) -> None:
            nonlocal micro_batch
            if model.training and torch.is_grad_enabled():
                micro_batch += 1
                self.begin(step, micro_batch, rank=rank, progress=step / steps if steps else 0.0)

        def update(*_: object) -> None:
            nonlocal step, micro_batch
            step, micro_batch = step + 1, -1
            self.begin(step, rank=rank, progress=step / steps if steps else 0.0)

        model.register_forward_pre_hook(forward)
        optimizer.register_step_post_hook(update)

    def penalty(self) -> Tensor | None:
        """Return the penalty to add to the loss: λ · Σ over layers of mean |b_t − target| (GaussWS eq. 12).

        λ is the recipe's `sampler.penalty`, target its `sampler.target`; b_t are a layer's learned bit widths. Return
        None if λ is 0 or no layer has a sampler.
        """
        if not self.recipe.sampler.penalty:
            return None
        terms = (self.penalty_term(layer) for layer in self.layers)
        return self.weighted([term for term in terms if term is not None])

    def penalty_term(self, layer: QuantizedLinear) -> Tensor | None:
        """Return the mean of |b_t − target| over a layer's bit widths b_t; None if the layer has no sampler.

        target is the recipe's `sampler.target`.
        """
        bits = layer.bits
        return None if bits is None else (bits - self.recipe.sampler.target).abs().mean()

    def weighted(self, terms: list[Tensor]) -> Tensor | None:
        """Return `sampler.penalty` (λ) times the sum of the layers' penalty terms; None if the list is empty."""
        return self.recipe.sampler.penalty * torch.stack(terms).sum() if terms else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copies and pickles; `last_input`, a cache of a quantized layer input, is None."""
        return {**self.__dict__, "last_input": None}


def quantize(
    model: nn.Module,
    recipe: Recipe,
    *,
    seed: int = 0,
    observer: Observer | None = None,
    keep_weights: bool = True,
) -> Quantization:
    """Replace the linear layers of the model's blocks, in place, by quantized ones with the same parameters.

    Create optimizers afterwards, because a sampler adds a parameter `bit_scale` to every layer with noise.
    seed: the rounding seed, from which the seeds of stochastic rounding, noise and rotation signs are derived.
    observer: collects statistics of the quantized operands.
    keep_weights: True quantizes and casts each weight once per update and keeps the result; False does so in every
        forward and backward pass, to save memory.

    >>> quantization = quantize(model, Recipe.from_dict({"fprop": {"x": "e4m3:1x128:amax", "w": "e4m3:128x128:amax"}}))
    >>> quantization.attach(model, optimizer)   # or quantization.begin(step) before every forward
    """
    linears = list(linear_layers(model))
    if not linears:
        raise ValueError(f"{type(model).__name__} has no linear layer in its blocks to quantize")
    blocks = 1 + max(layer.block for layer in linears)
    quantization = Quantization(recipe, seed, observer, keep_weights)
    plans = _plans(recipe, recipe.operands, recipe.switched)
    high = _plans(recipe, recipe.kept, recipe.kept)
    kept = keep(recipe, linears, blocks)
    _check_parts(recipe, linears)
    check_execution(recipe, ((layer.name, layer.linear) for layer in linears), kept)
    for index, layer in enumerate(linears):
        is_kept = layer.name in kept
        sampler = recipe.sampler if layer.part in recipe.sampled_parts and not is_kept else None
        quantized = QuantizedLinear(layer, quantization, index, high if is_kept else plans, sampler)
        parent, _, last = layer.name.rpartition(".")
        setattr(model.get_submodule(parent), last, quantized)
        quantization.layers.append(quantized)
    quantization.kept = [layer.name for layer in linears if layer.name in kept]
    for module in model.modules():  # fewbits' own layers that were not replaced, because they are outside the blocks
        if isinstance(module, Linear):
            module.keeps_cast = keep_weights
    if observer is not None:
        observer.bind(len(linears))
    return quantization


@contextmanager
def unquantized(quantization: Quantization) -> Iterator[None]:
    """Compute all GEMMs from unquantized operands inside a `with` block, for evaluation in the compute dtype.

    A sampler's noise is not removed.
    """
    plan = Plan(Recipe().operands)  # the default recipe has `high` in every slot
    plans = [layer.plans for layer in quantization.layers]
    try:
        for layer in quantization.layers:
            layer.use(plan, plan)
        yield
    finally:
        for layer, own in zip(quantization.layers, plans, strict=True):
            layer.use(*own)


def linear_layers(model: nn.Module) -> Iterator[BlockLinear]:
    """Yield a BlockLinear (name, block, part and module) for each linear layer to which recipes apply.

    These are the linear layers inside the model's blocks, or all linear layers of a model without blocks, in the order
    of `named_modules`. The output projection of an nn.MultiheadAttention is omitted.
    """
    if isinstance(model, nn.Linear):
        raise ValueError(
            "the model is itself a linear layer, which cannot be replaced in place: put it into an nn.Sequential"
        )
    containers = {n: list(m._modules) for n, m in model.named_modules() if _holds_blocks(m)}
    outermost = [n for n in containers if not any(_inside(n, outer) for outer in containers if outer != n)]
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
            continue
        container = next((n for n in outermost if _inside(name, n)), None)
        if container is None and outermost:
            continue
        inner = name if container is None else name[len(container) :].lstrip(".")
        block = 0 if container is None else containers[container].index(inner.split(".")[0])
        yield BlockLinear(name, block, getattr(module, "part", None) or _part_from_name(name), module)


def keep(recipe: Recipe, layers: Sequence[BlockLinear], blocks: int) -> frozenset[str]:
    """Return the names of the layers that the recipe's setting `keep` selects, by block number, part or layer name.

    In a selected layer, every slot has the quantizer `keep.by`, by default `high` (unquantized). blocks: the number of
    blocks of the model.
    """
    k = recipe.keep
    if k.first + k.last >= blocks and (k.first or k.last):
        raise ValueError(
            f"recipe {recipe.name} keeps the first {k.first} and last {k.last} of {blocks} blocks in high precision: "
            "no layer would be quantized; use a deeper model or keep fewer blocks"
        )
    selected = parts(k.parts)
    for glob in k.names:
        if not any(fnmatchcase(layer.name, glob) for layer in layers):
            raise ValueError(
                f"keep.names: no layer matches {glob!r}; the layers are {_abbreviate(layer.name for layer in layers)}"
            )
    return frozenset(
        layer.name
        for layer in layers
        if layer.block < k.first
        or layer.block >= blocks - k.last
        or layer.part in selected
        or any(fnmatchcase(layer.name, glob) for glob in k.names)
    )


def _plans(recipe: Recipe, before: Operands, after: Operands) -> tuple[Plan, Plan]:
    """Return a layer's Plan (its six slots and the GEMMs executed in FP8) before and after the recipe's switch.

    The switch is a change of quantizers during training. before, after: the layer's six slots before and after it. If
    they are equal, both Plans are the same object.
    """
    first = Plan(before, executed_gemms(recipe, before))
    return first, first if after == before else Plan(after, executed_gemms(recipe, after))


def _check_parts(recipe: Recipe, layers: Sequence[BlockLinear]) -> None:
    """Check that the recipe's `keep.parts` and `sampler.parts` can be applied to the layers.

    Raise ValueError if the recipe selects layers by part and the part of a layer is unknown, or if the recipe has a
    sampler and no layer is of a part that the sampler selects.
    """
    selected = parts(recipe.keep.parts) | recipe.sampled_parts
    unknown = [layer.name for layer in layers if layer.part is None]
    if selected and unknown:
        raise ValueError(
            f"recipe {recipe.name} selects layers by part, but the part of {_abbreviate(unknown)} is unknown: give "
            f"the module an attribute `part`, one of {', '.join(PARTS)}"
        )
    have = sorted({str(layer.part) for layer in layers})
    if recipe.sampler.kind != "none" and recipe.sampled_parts.isdisjoint(have):
        raise ValueError(
            f"sampler.parts {list(recipe.sampler.parts)}: they select no layer, so none would get noise; the model has "
            f"only the parts {', '.join(have)}"
        )


def _holds_blocks(module: nn.Module) -> bool:
    """Tell whether a module is a ModuleList, a Sequential, or a non-empty ModuleDict whose keys are all numbers.

    The children of the outermost such modules are the model's blocks.
    """
    if isinstance(module, nn.ModuleDict):
        return bool(module) and all(key.isdecimal() for key in module)
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _part_from_name(name: str) -> str | None:
    components = name.split(".")
    return PART_OF_NAME.get(".".join(components[-2:])) or PART_OF_NAME.get(components[-1])


def _inside(name: str, container: str) -> bool:
    """Tell whether a module lies inside another, by their names in the model; the model itself is `""`."""
    return container == "" or name.startswith(f"{container}.")


def _abbreviate(names: Iterable[str]) -> str:
    """Join names for a message: the first six, and how many more there are."""
    names = list(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
