"""Train fewbits' models in torchtitan 0.2.2: define a train spec, from which torchtitan's config selects a model.

    [model]
    name = "fewbits"
    flavor = "nemotron3-8b"

torchtitan provides tokens, loss, optimizer, schedule and checkpoints. Its setting `training.mixed_precision_param` is
the dtype in which the model computes. Gradients are reduced over ranks after every micro-batch, so that no rank has to
store whole gradients.
"""

# No `from __future__ import annotations`: torchtitan reads the types of the dataclass below.
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
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

from fewbits.experiments.torchtitan.our_models import fitted, flops_per_token, initialise, shard
from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.presets import MODELS

NAME = "fewbits"  # the name of the train spec


@dataclass
class DecoderArgs(BaseModelArgs):  # type: ignore[misc]
    """The arguments of one of fewbits' models for torchtitan; `update_from_config` completes them."""

    flavor: str = "hybrid-nano"
    config: DecoderConfig = MODELS["hybrid-nano"]
    compute_dtype: str = "bfloat16"

    def update_from_config(self, job_config: Any, **_: Any) -> None:
        """Set the compute dtype, and the model's context and vocabulary, from torchtitan's config and tokenizer.

        Raise ValueError for settings that these models do not support.
        """
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


def problems(job_config: Any) -> Iterator[str]:
    """Yield a message for each setting of torchtitan's config that fewbits' models do not support."""
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
    if job_config.training.mixed_precision_reduce != "float32":
        yield (
            f"training.mixed_precision_reduce: gradients of {NAME} are reduced in FP32; set "
            "training.mixed_precision_reduce=float32"
        )
    if job_config.training.enable_cpu_offload:
        yield f"training.enable_cpu_offload: models of {NAME} do not support it; set training.enable_cpu_offload=false"


def train_spec(build_metrics_processor: Any) -> TrainSpec:
    """Return the train spec `fewbits` for torchtitan.

    build_metrics_processor: the function that torchtitan calls to make its metrics processor.
    """
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
