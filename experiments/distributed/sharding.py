"""Distribute a model over the ranks of a trial by torch's `fully_shard`, which treats each block as one unit.

Every rank stores a part of each parameter, and the same part of its gradient and optimizer state. A block's parameters
are gathered before its forward and backward pass and freed afterwards; gradients are reduced to the mean over ranks.
Weights are gathered and gradients reduced in FP32: layers cast and quantize the gathered weights.

The model is built on torch's meta device, without memory. Each block is allocated, initialised and sharded before the
next one, so that a device never has more than one whole block, or the whole embedding and head, in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fewbits.models.learned_widths import sampled_layers
from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.initialise import initialise_block, initialise_outside_blocks, initialise_positions
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import QuantizedLinear


def build_sharded(
    config: DecoderConfig,
    *,
    seed: int,
    device: torch.device,
    ranks: int,
    compute_dtype: torch.dtype,
    quantized: Callable[[Decoder], Quantization],
) -> tuple[Decoder, Quantization]:
    """Return a model with its initial parameters sharded over all ranks, and its quantization.

    The initial parameters have the same bits as those of `fewbits.models.networks.registry.build` with this seed.

    quantized: a function that quantizes the model; called before the parameters have memory. It must not copy weights.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    with torch.device("meta"):
        model = Decoder(config, compute_dtype)
    quantization = quantized(model)
    mesh = init_device_mesh(device.type, (ranks,))
    for number, block in enumerate(model.blocks):
        block.to_empty(device=device)
        initialise_block(model, number, seed)
        fully_shard(block, mesh=mesh)
    _materialise_rest(model, device)
    initialise_outside_blocks(model, seed)
    initialise_positions(model, device)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean; the sum is divided afterwards
    register_fsdp_forward_method(model, "loss")
    return model, quantization


def recompute_blocks(model: Decoder) -> None:
    """Make every block compute its forward pass again in the backward pass, instead of keeping its activations."""
    for block in model.blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=model.config.dropout > 0
        )


def synchronize_gradients(model: nn.Module, now: bool) -> None:
    """Set whether the next backward pass of a sharded model reduces gradients; only the last of a step has to."""
    if callable(set_sync := getattr(model, "set_requires_gradient_sync", None)):
        set_sync(now)


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters outside the blocks of a sharded model, as only a backward pass does by itself."""
    if callable(free := getattr(model, "reshard", None)):
        free()


def _materialise_rest(model: Decoder, device: torch.device) -> None:
    """Allocate the parameters outside the blocks; a tied head uses the embedding's weight."""
    for module in (model.embed, model.positions, model.norm, model.head):
        if module is not None:
            module.to_empty(device=device)
    if model.config.tied:
        model.head.weight = model.embed.weight


class Penalties:
    """The terms of the penalty on learned bit widths (GaussWS eq. 12), collected layer by layer in one forward pass.

    Outside a block's forward pass, a rank has only a part of a layer's bit widths. So a hook computes the layer's term
    during the forward pass of a step's first micro-batch, and the term's gradient is reduced over ranks together with
    that of the loss. There are none if the recipe has no penalty (`sampler.penalty` is 0).
    """

    def __init__(self, quantization: Quantization) -> None:
        self._quantization = quantization
        self._terms: list[Tensor] = []
        if quantization.recipe.sampler.penalty:
            for layer in sampled_layers(quantization):
                layer.register_forward_hook(self._add)

    def take(self) -> Tensor | None:
        """Return the penalty of the last forward pass and forget its terms; None if the recipe has no penalty."""
        terms, self._terms = self._terms, []
        return self._quantization.weighted(terms)

    def _add(self, layer: nn.Module, *_: object) -> None:
        assert isinstance(layer, QuantizedLinear)
        if not layer.training or self._quantization.context.micro_batch or _current_graph_task_id() != -1:
            return  # evaluation, a later micro-batch, or a block that is computed again in the backward pass
        # Save these tensors themselves for the backward pass. With training.recompute, torch would otherwise try to
        # compute them again from the block, before the block's parameters are gathered.
        with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            term = self._quantization.penalty_term(layer)
        assert term is not None
        self._terms.append(term)
