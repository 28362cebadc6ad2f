"""Train fewbits' models in torchtitan 0.2.2: define a train spec, from which torchtitan's config selects a model.

    [model]
    name = "fewbits"
    flavor = "nemotron3-8b"

torchtitan provides tokens, loss, optimizer, schedule and checkpoints. Its setting `training.mixed_precision_param` is
the dtype in which the model computes. As in fewbits' own training, parameters are FP32, FSDP gathers weights and
reduces gradients in FP32, and each layer casts or quantizes its gathered weight. Gradients are reduced over ranks after
every micro-batch, so that no rank has to store whole gradients.
"""

# No `from __future__ import annotations`: torchtitan reads the types of the dataclass below.
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.components.validate import build_validator
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list, apply_ddp
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import TrainSpec

from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.initialise import initialise_block, initialise_outside_blocks, initialise_positions
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import flops_per_token, with_vocab

NAME = "fewbits"  # the name of the train spec
RECOMPUTED = "_checkpoint_wrapped_module."  # torch's activation checkpointing inserts this in names of parameters


@dataclass
class DecoderArgs(BaseModelArgs):  # type: ignore[misc]
    """The arguments of one of fewbits' models for torchtitan."""

    flavor: str = "hybrid-nano"
    config: DecoderConfig = MODELS["hybrid-nano"]
    compute_dtype: str = "bfloat16"

    def update_from_config(self, job_config: Any, **_: Any) -> None:
        """Complete the arguments from torchtitan's config; ValueError for settings that our models do not support."""
        for problem in problems(job_config):
            raise ValueError(problem)
        self.compute_dtype = job_config.training.mixed_precision_param
        tokens = build_hf_tokenizer(job_config).get_vocab_size()
        self.config = fitted(self.flavor, tokens, job_config.training.seq_len)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters, and the FLOPs per token of forward and backward pass."""
        return sum(parameter.numel() for parameter in model.parameters()), flops_per_token(self.config, seq_len)


class TitanDecoder(Decoder):
    """A decoder with the interface that torchtitan expects: constructor, `layers` and `init_weights`."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args.config, TORCH_DTYPE_MAP[args.compute_dtype])

    @property
    def layers(self) -> nn.Module:
        return self.blocks

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits. torchtitan's autocast is disabled, because the layers cast their operands themselves."""
        with torch.autocast(tokens_BT.device.type, enabled=False):
            return super().forward(tokens_BT)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        initialise(self, buffer_device)


def fitted(flavor: str, tokens: int, length: int) -> DecoderConfig:
    """Return a model with context and vocabulary enlarged for the data; ValueError if they are fixed."""
    config = MODELS[flavor]
    if config.experts:
        raise ValueError(f"model {flavor} has experts, whose balance loss torchtitan does not add: use fewbits train")
    if length > config.context:
        if config.positions == "learned":
            raise ValueError(f"training.seq_len {length}: model {config.name} has {config.context} positions")
        config = replace(config, context=length)
    if (enlarged := with_vocab(config, tokens)) is None:
        raise ValueError(f"the tokenizer has {tokens} tokens, model {config.name} only a vocabulary of {config.vocab}")
    return enlarged


@torch.no_grad()
def initialise(model: Decoder, buffer_device: torch.device | None = None) -> None:
    """Fill the parameters, which may be sharded, block by block with `registry.build`'s bits for torchtitan's seed."""
    seed, device = torch.initial_seed() % (1 << 63), model.embed.weight.device
    if model.config.tied:  # torchtitan has allocated new memory for each parameter
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
    """Copy the parameters of a module, whose name is `prefix`, into the model's parameters, which may be sharded."""
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
    """Shard each block, and the parameters outside the blocks, over the mesh."""
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


def parallelize(model: TitanDecoder, parallel_dims: Any, job_config: Any) -> nn.Module:
    """Apply activation checkpointing and FSDP, HSDP or DDP to the model, as torchtitan's config says; return it."""
    recompute = job_config.activation_checkpoint
    if recompute.mode != "none":
        apply_ac(model, recompute, op_sac_save_list=_op_sac_save_list, base_folder=job_config.job.dump_folder)
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        free = job_config.parallelism.fsdp_reshard_after_forward != "never"
        shard(model, parallel_dims.get_mesh(names), reshard_after_forward=free)
    elif parallel_dims.dp_replicate_enabled:
        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=False)
    return model


def unsupported(job_config: Any) -> Iterator[str]:
    """Yield a message for each setting of torchtitan's config that neither fewbits' models nor recipes support."""
    for name in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(job_config.parallelism, f"{name}_parallel_degree")
        if degree > 1:
            yield f"parallelism.{name}_parallel_degree {degree}: {NAME} needs whole weights, so use FSDP, HSDP or DDP"
    if job_config.compile.enable and "model" in job_config.compile.components:
        yield "compile.components includes model: quantized layers change with the step; set compile.components=loss"


def problems(job_config: Any) -> Iterator[str]:
    """Yield a message for each setting of torchtitan's config that fewbits' models do not support."""
    yield from unsupported(job_config)
    for name in ("dtype", "mixed_precision_reduce"):
        if (value := getattr(job_config.training, name)) != "float32":
            yield f"training.{name} {value}: parameters and gradients of {NAME} are FP32; set training.{name}=float32"
    if job_config.training.enable_cpu_offload:
        yield f"training.enable_cpu_offload: models of {NAME} do not support it; set training.enable_cpu_offload=false"


def train_spec(build_metrics_processor: Any) -> TrainSpec:
    """Return the train spec `fewbits` for torchtitan."""
    return TrainSpec(
        model_cls=TitanDecoder,  # it lacks a method of torchtitan's interface that only other kinds of attention need
        model_args={name: DecoderArgs(flavor=name, config=config) for name, config in MODELS.items()},
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_text_dataloader,
        build_tokenizer_fn=build_hf_tokenizer,
        build_loss_fn=build_cross_entropy_loss,
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics_processor,
    )
