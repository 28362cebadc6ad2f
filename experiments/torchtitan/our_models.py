"""Prepare fewbits' models for any supported version of torchtitan: sizes, initial parameters and sharding.

As in fewbits' own training, parameters are FP32, FSDP gathers weights and reduces gradients in FP32, and each layer
casts or quantizes its gathered weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.initialise import initialise_block, initialise_outside_blocks, initialise_positions
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import linear_parameters

ROUND = 64  # vocabularies of nano models are padded to a multiple of this, as in fewbits.experiments.setup
RECOMPUTED = "_checkpoint_wrapped_module."  # torch's activation checkpointing inserts this in names of parameters


def fitted(flavor: str, tokens: int, length: int) -> DecoderConfig:
    """Return the configuration of a model, with its context and vocabulary enlarged as needed.

    flavor: the model's name. tokens: the size of the tokenizer's vocabulary. length: the sequence length.

    Raise ValueError if the context is too short and positions are learned, or if the vocabulary is too small and the
    model is not a nano model.
    """
    config = MODELS[flavor]
    if length > config.context:
        if config.positions == "learned":
            raise ValueError(
                f"training.seq_len {length}: model {config.name} has {config.context} positions; "
                f"set training.seq_len to {config.context} or less"
            )
        config = replace(config, context=length)
    if tokens > config.vocab:
        if not config.name.endswith("-nano"):
            raise ValueError(
                f"the tokenizer has {tokens} tokens, but the vocabulary of model {config.name} has only {config.vocab}"
                "; use a smaller tokenizer, or a nano model, whose vocabulary is enlarged as needed"
            )
        config = replace(config, vocab=-(-tokens // ROUND) * ROUND)
    return config


def flops_per_token(config: DecoderConfig, length: int) -> int:
    """Return the FLOPs per token of forward and backward pass.

    These are 6 for each weight of a linear layer, including the head, plus the FLOPs of attention to `length` tokens.
    """
    attentions = config.pattern.count("*") if config.pattern else config.layers
    matrices = linear_parameters(config) + config.width * config.vocab
    return 6 * matrices + 12 * attentions * config.heads * config.head_dim * length


@torch.no_grad()
def initialise(model: Decoder, buffer_device: torch.device | None = None) -> None:
    """Fill the parameters, which may be sharded, with the initial values for the seed that torchtitan set.

    The values have the same bits as those of `fewbits.models.networks.registry.build`. To save memory, only one
    unsharded block exists at a time. A tied head is tied to the embedding again, because torchtitan has allocated new
    memory for each parameter.
    buffer_device: the device of the rotary angles; None: the device of the parameters.
    """
    seed, device = torch.initial_seed() % (1 << 63), model.embed.weight.device
    if model.config.tied:
        model.head.weight = model.embed.weight
    parameters_of_model = {name.replace(RECOMPUTED, ""): parameter for name, parameter in model.named_parameters()}
    with torch.device("meta"):
        source = Decoder(model.config, model.compute_dtype)
    for number, block in enumerate(source.blocks):
        block.to_empty(device=device)
        initialise_block(source, number, seed)
        _copy(block, parameters_of_model, f"blocks.{number}")
        block.to_empty(device="meta")
    outside = [(name, module) for name, module in source.named_children() if name != "blocks"]
    for _, module in outside:
        module.to_empty(device=device)
    initialise_outside_blocks(source, seed)
    for name, module in outside:
        _copy(module, parameters_of_model, name)
    initialise_positions(model, buffer_device or device)


def _copy(module: nn.Module, parameters_of_model: dict[str, nn.Parameter], prefix: str) -> None:
    """Copy the parameters of a module into the model's parameters with the same names, which may be sharded.

    parameters_of_model: by name. prefix: the module's name in the model.
    """
    for name, parameter in module.named_parameters(prefix=prefix):
        if name not in parameters_of_model:  # a tied head: `named_parameters` lists its weight only as the embedding's
            continue
        values, target = parameter.detach(), parameters_of_model[name]
        # Every rank has computed all values, so none are sent between ranks (src_data_rank=None). torch's function also
        # supports the mesh of HSDP, which has two dimensions.
        if isinstance(target, DTensor):
            values = distribute_tensor(values, target.device_mesh, target.placements, src_data_rank=None).to_local()
            target.to_local().copy_(values)
        else:
            target.copy_(values)


def shard(model: Decoder, mesh: Any, *, reshard_after_forward: bool) -> None:
    """Shard each block, and the parameters outside the blocks, over the mesh.

    Gradients are summed over ranks, not averaged, because torchtitan has divided the loss by the tokens of all ranks.
    """
    for module in model.modules():
        if isinstance(module, Linear):
            module.keeps_cast = False  # a cached cast would keep a whole weight in memory after the shards are freed
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # torchtitan has divided the loss by the tokens of all ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot reduce to a mean
