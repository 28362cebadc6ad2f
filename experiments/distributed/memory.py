"""Estimate the memory that a trial needs on each rank, without allocating any of it.

    weights       FP32: this rank's rows of every parameter
    gradients     FP32: this rank's rows of every gradient; with several ranks and several micro-batches per rank, also
                  whole gradients, unless training.reduce_each reduces them over ranks after every micro-batch
    states        the optimizer's moments
    gathered      with several ranks: whole parameters and gradients of two blocks (the one that computes and the next
                  one) and of everything outside the blocks
    quantized     quantized or cast copies of weights: of all blocks with one rank, of one block with several ranks
    activations   tensors that the forward pass saves for the backward pass, measured by a run with fake tensors; with
                  training.recompute, the inputs of all blocks and all saved tensors of the largest block

Temporary tensors inside a layer and the allocator's fragmentation are not included; `MARGIN` allows for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fewbits.experiments.optimization.precision import DTYPES
from fewbits.experiments.trial import Trial
from fewbits.models.networks.decoder import Decoder, DecoderConfig, logits_at_once
from fewbits.models.networks.partition import partition_of
from fewbits.models.networks.registry import on_meta
from fewbits.models.quantize import quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import Recipe

FP32 = 4  # bytes
MARGIN = 0.9  # the fraction of a device's memory that an estimate may use
MOST_RANKS = 4096


@dataclass(frozen=True)
class Memory:
    """Estimated bytes on the rank that has the most rows of parameters; this module's docstring explains the fields."""

    weights: int
    gradients: int
    states: int
    gathered: int
    quantized: int
    activations: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


def estimate(trial: Trial, ranks: int = 1, device: str = "cuda") -> Memory:
    """Return the estimated memory that a trial needs on each of its ranks; device: the kind of device, cpu or cuda."""
    t, dtype, shared = trial.training, DTYPES[trial.training.dtype], ranks == 1
    model = _on_meta(trial.model, trial.recipe, dtype)
    parameters = dict(model.named_parameters())
    own = {name: _rows_bytes(parameter, ranks) for name, parameter in parameters.items()}
    everything, blocks = _bytes(parameters.values()), [_bytes(block.parameters()) for block in model.blocks]
    linear = [_bytes(m.weight for m in block.modules() if isinstance(m, nn.Linear)) for block in model.blocks]
    several = t.batch // (t.micro_batch * ranks) > 1 and not t.reduce_each
    entry, saved, around = _saved(trial.model, trial.recipe, dtype, t.micro_batch, t.length)
    logits = min(logits_at_once(device), t.micro_batch * t.length * trial.model.vocab)
    outside = around + 2 * logits * (FP32 if device == "cpu" else dtype.itemsize)  # 2: and their gradient
    copies = (2 if trial.recipe.operands else 1) * dtype.itemsize
    return Memory(
        weights=sum(own.values()),
        gradients=sum(own.values()) + (everything if several and not shared else 0),
        states=_states(trial, own),
        gathered=0 if shared else 2 * (everything - sum(blocks)) + 4 * max(blocks),
        quantized=(sum(linear) if shared else max(linear)) // FP32 * copies,
        activations=outside + (entry * len(saved) + max(saved) if t.recompute else sum(saved)),
    )


def least_ranks(trial: Trial, device_bytes: float) -> int | None:
    """Return the smallest divisor of a step's micro-batches that is a number of ranks on which the trial fits."""
    micro_batches = trial.training.batch // trial.training.micro_batch
    for ranks in range(1, min(micro_batches, MOST_RANKS) + 1):
        if micro_batches % ranks == 0 and fits(trial, ranks, device_bytes):
            return ranks
    return None


def fits(trial: Trial, ranks: int, device_bytes: float) -> bool:
    return estimate(trial, ranks).total <= MARGIN * device_bytes


def complaint(trial: Trial, ranks: int, device_bytes: float) -> str | None:
    """Return a message, with what would be enough, if a trial does not fit into `device_bytes` of memory per rank."""
    needed = estimate(trial, ranks).total
    if needed <= MARGIN * device_bytes:
        return None
    helps = []
    if (least := least_ranks(trial, device_bytes)) is not None:
        helps.append(f"{least} ranks would fit")
    for names in (("recompute",), ("reduce_each",), ("recompute", "reduce_each"))[: 1 if ranks == 1 else None]:
        changes: dict[str, Any] = dict.fromkeys(names, True)
        if fits(replace(trial, training=replace(trial.training, **changes)), ranks, device_bytes):
            helps.append(f"{' '.join(f'training.{name}=true' for name in names)} would fit")
            break
    subject = f"{ranks} ranks need {needed / 1e9:.1f} GB each" if ranks > 1 else f"1 rank needs {needed / 1e9:.1f} GB"
    return (
        f"{subject}, but {MARGIN:.0%} of {device_bytes / 1e9:.4g} GB may be used; "
        f"{', or '.join(helps) or 'lower training.micro_batch or training.length'}"
    )


# ------------------------------------------------------------------------------------------------ details


@lru_cache(4)  # `least_ranks` tries many numbers of ranks
def _on_meta(config: DecoderConfig, recipe: Recipe, dtype: torch.dtype) -> Decoder:
    return _model(config, recipe, dtype, "meta")


def _model(config: DecoderConfig, recipe: Recipe, dtype: torch.dtype, device: str) -> Decoder:
    with torch.device(device):
        model = Decoder(config, dtype)
    quantize(model, recipe, keep_weights=False)
    return model


@lru_cache(256)
def _saved(
    config: DecoderConfig, recipe: Recipe, dtype: torch.dtype, sequences: int, length: int
) -> tuple[int, list[int], int]:
    """Return the bytes of a block's input, and those that a forward pass saves in each block and outside the blocks."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    counts, kept = [0], dict[int, Tensor]()  # saved tensors stay alive: a new one might reuse a freed storage

    def pack(x: Tensor) -> Tensor:
        if _storage(x) not in kept:
            kept[_storage(x)] = x
            counts[-1] += x.untyped_storage().nbytes()
        return x

    with FakeTensorMode(), saved_tensors_hooks(pack, lambda x: x):
        model = _model(config, recipe, dtype, "cpu").train()
        kept |= {_storage(parameter): parameter for parameter in model.parameters()}
        # What a block saves depends only on its kind and the kind of the block before: each pair of kinds runs once.
        pairs = list(pairwise([None, *map(_kind, model.blocks)]))
        for number, block in enumerate(model.blocks):
            if pairs.index(pairs[number]) < number:
                block.forward = lambda x, y: (x, y)
            block.register_forward_pre_hook(lambda *_: counts.append(0))
        model.blocks[-1].register_forward_hook(lambda *_: counts.append(0))
        size = model.hidden(torch.zeros(sequences, length, dtype=torch.int64)).nbytes
    blocks = [counts[1 + pairs.index(pair)] for pair in pairs]
    return 2 * size, blocks, counts[0] + counts[-1] + size  # 2: the residual stream and the last branch's result


def _kind(block: nn.Module) -> tuple[object, ...]:
    """Return what determines, with the block before, how many bytes a block saves for the backward pass."""
    layers = [module for module in block.modules() if isinstance(module, QuantizedLinear)]
    return block.branches, *((id(layer.plans), layer.sampler is None) for layer in layers)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() * FP32 for parameter in parameters)


def _rows_bytes(parameter: Tensor, ranks: int) -> int:
    rows = parameter.shape[0]
    return -(-rows // ranks) * (parameter.numel() // rows) * FP32


def _states(trial: Trial, own: dict[str, int]) -> int:
    """Return the bytes of the optimizer's moments. own: this rank's bytes of each parameter."""
    partition, second = partition_of(on_meta(trial.model), trial.optimizer.kind), 0
    for name, size in own.items():
        parts = partition.get(name, "tensor" if trial.optimizer.kind == "adam-mini" else "element")
        if trial.optimizer.kind != "muon" or parts == "element":
            second += size if parts == "element" else FP32 * (1 if isinstance(parts, str) else len(parts))
    return sum(own.values()) + second
