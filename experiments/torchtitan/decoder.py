"""Train fewbits' models in torchtitan 0.2.2: its train spec `fewbits`, with a flavor for each model of the registry.

    [model]
    name = "fewbits"
    flavor = "nemotron3-8b"

Tokens, loss, optimizer, schedule and checkpoints are torchtitan's. As in our own training script, parameters are FP32,
FSDP gathers weights and reduces gradients in FP32, and layers cast or quantize what they have gathered;
`training.mixed_precision_param` is the dtype in which the model computes. torchtitan reduces the gradients of every
micro-batch, so that no rank holds whole gradients.
"""

# No `from __future__ import annotations`: torchtitan reads the types of the dataclass below.
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
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
from fewbits.models.networks.registry import linear_parameters

NAME = "fewbits"  # of the train spec
ROUND = 64  # vocabularies of nano models are padded to a multiple of this, as in fewbits.experiments.setup
RECOMPUTED = "_checkpoint_wrapped_module."  # in the names of parameters of blocks that torch's wrapper recomputes


@dataclass
class DecoderArgs(BaseModelArgs):
    """The arguments of a model of the registry, complete after `update_from_config`."""

    flavor: str = "hybrid-nano"
    config: DecoderConfig = MODELS["hybrid-nano"]
    compute_dtype: str = "bfloat16"

    def update_from_config(self, job_config: Any, **_: Any) -> None:
        """Take the compute dtype, the sequence length and the tokenizer's vocabulary from torchtitan's config."""
        for problem in problems(job_config):
            raise ValueError(problem)
        self.compute_dtype = job_config.training.mixed_precision_param
        config, length = MODELS[self.flavor], job_config.training.seq_len
        if length > config.context:
            if config.positions == "learned":
                raise ValueError(f"training.seq_len {length}: model {config.name} has {config.context} positions")
            config = replace(config, context=length)
        tokens = build_hf_tokenizer(job_config).get_vocab_size()
        if tokens > config.vocab:
            if not config.name.endswith("-nano"):
                raise ValueError(
                    f"model.hf_assets_path {job_config.model.hf_assets_path}: the tokenizer has {tokens} tokens, but "
                    f"model {config.name} has {config.vocab}"
                )
            config = replace(config, vocab=-(-tokens // ROUND) * ROUND)
        self.config = config

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters, and the FLOPs per token of forward and backward pass."""
        config = self.config
        attentions = config.pattern.count("*") if config.pattern else config.layers
        matrices = linear_parameters(config) + config.width * config.vocab
        flops = 6 * matrices + 12 * attentions * config.heads * config.head_dim * seq_len
        return sum(parameter.numel() for parameter in model.parameters()), flops


class TitanDecoder(Decoder):
    """A decoder with the constructor, the initialisation and the name of its blocks that torchtitan expects."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args.config, TORCH_DTYPE_MAP[args.compute_dtype])

    @property
    def layers(self) -> nn.Module:
        return self.blocks

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits; layers choose their dtypes themselves, so torchtitan's autocast is off."""
        with torch.autocast(tokens_BT.device.type, enabled=False):
            return super().forward(tokens_BT)

    @torch.no_grad()
    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fill the parameters, which may be sharded, with the bits of `build` for the seed that torchtitan has set.

        One block at a time exists as a whole. torchtitan has allocated the parameters one by one before, so a tied head
        has to be tied again.
        """
        seed, device = torch.initial_seed() % (1 << 63), self.embed.weight.device
        if self.config.tied:
            self.head.weight = self.embed.weight
        own = {name.replace(RECOMPUTED, ""): parameter for name, parameter in self.named_parameters()}
        with torch.device("meta"):
            source = Decoder(self.config, self.compute_dtype)
        for number, block in enumerate(source.blocks):
            block.to_empty(device=device)
            initialise_block(source, number, seed)
            _copy(block, own, f"blocks.{number}.")
            block.to_empty(device="meta")
        outside = [(name, module) for name, module in source.named_children() if name != "blocks"]
        for _, module in outside:
            module.to_empty(device=device)
        initialise_outside_blocks(source, seed)
        for name, module in outside:
            _copy(module, own, f"{name}.")
        initialise_positions(self, buffer_device or device)


def _copy(module: nn.Module, own: dict[str, nn.Parameter], prefix: str) -> None:
    for name, parameter in module.named_parameters(prefix=prefix.rstrip(".")):
        if name not in own:  # a tied head has the embedding's name
            continue
        values, target = parameter.detach(), own[name]
        if isinstance(target, DTensor):  # each rank has all values, so none is sent; HSDP's mesh has two dimensions
            values = distribute_tensor(values, target.device_mesh, target.placements, src_data_rank=None).to_local()
            target.to_local().copy_(values)
        else:
            target.copy_(values)


def parallelize(model: TitanDecoder, parallel_dims: Any, job_config: Any) -> nn.Module:
    """Recompute blocks if the config says so, and distribute the model: FSDP, HSDP or DDP."""
    recompute = job_config.activation_checkpoint
    if recompute.mode != "none":
        apply_ac(model, recompute, op_sac_save_list=_op_sac_save_list, base_folder=job_config.job.dump_folder)
    if parallel_dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        _shard(model, parallel_dims.get_mesh(names), job_config)
    elif parallel_dims.dp_replicate_enabled:
        apply_ddp(model, parallel_dims.get_mesh("dp_replicate"), enable_compile=False)
    return model


def _shard(model: TitanDecoder, mesh: Any, job_config: Any) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce])
    for module in model.modules():
        if isinstance(module, Linear):
            module.keeps_cast = False  # a cast of the gathered weight would outlive it
    free = job_config.parallelism.fsdp_reshard_after_forward != "never"
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of all ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean


def problems(job_config: Any) -> Iterator[str]:
    """Yield a line for each setting of torchtitan that these models do not follow."""
    for name in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(job_config.parallelism, f"{name}_parallel_degree")
        if degree > 1:
            yield (
                f"parallelism.{name}_parallel_degree {degree}: models of {NAME} support only data parallelism "
                "(FSDP, HSDP, DDP)"
            )
    if job_config.compile.enable and "model" in job_config.compile.components:
        yield f"compile.components includes model: models of {NAME} are not compiled; set compile.components=loss"
    if job_config.training.dtype != "float32":
        yield f"training.dtype {job_config.training.dtype}: parameters of {NAME} are FP32; set training.dtype=float32"
    if job_config.training.enable_cpu_offload:
        yield f"training.enable_cpu_offload: not supported for models of {NAME}; set it to false"


def train_spec(build_metrics_processor: Any) -> TrainSpec:
    """Return the train spec of all models of the registry."""
    return TrainSpec(
        model_cls=TitanDecoder,  # type: ignore[arg-type]  # torchtitan asks for a method that only other attention needs
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
