"""Train fewbits' models with its recipes in torchtitan 0.3.0, which takes a config from a Python module.

    torchrun --nproc_per_node=8 -m torchtitan.train --module fewbits.experiments.torchtitan.v0_3 --config hybrid-8b \\
        --fewbits.recipe nvfp4 --fewbits.settings keep.last=2 --hf_assets_path ./assets/hf/Llama-3.1-8B

`--config` names a model of the registry. torchtitan's own models are not supported in this version: 0.3.0 builds them
from a tree of configs, in which a recipe has no place; with 0.2.2 (fewbits.experiments.titan) they are.

torchtitan 0.3.0 captures a step in a CUDA graph unless `training.disable_cuda_graphs` is set. A graph replays the
kernels with the arguments of the captured step, so every step would repeat that step's seeds: it is set here, and its
absence is refused. A loss that is not finite ends the run with an error before it is logged.
"""

# No `from __future__ import annotations`: torchtitan reads the types of the dataclasses below.
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

SUPPORTED = "0.3.0"


def _check_version() -> None:
    try:
        installed = version("torchtitan")
    except PackageNotFoundError:
        installed = "none"
    if installed != SUPPORTED:
        raise ImportError(
            f"this module needs torchtitan {SUPPORTED}, not {installed}; fewbits.experiments.titan needs 0.2.2"
        )


_check_version()

import torchtitan.trainer  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: E402
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402

from fewbits.experiments.config import recipe_from_overrides  # noqa: E402
from fewbits.experiments.torchtitan.numerics import LoggedSteps, numerics  # noqa: E402
from fewbits.experiments.torchtitan.our_models import fitted, flops_per_token, initialise, shard  # noqa: E402
from fewbits.models.networks.decoder import Decoder, DecoderConfig  # noqa: E402
from fewbits.models.networks.presets import MODELS  # noqa: E402
from fewbits.models.quantize import quantize  # noqa: E402

NAME = "fewbits"
BACKEND = "partial_dtensor"  # of torchtitan's ways to shard, the one that only uses torch's DTensors


class TitanDecoder(Decoder, BaseModel):  # type: ignore[misc]
    """A decoder that torchtitan builds from its config, with the layers that the recipe quantizes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):  # type: ignore[misc]
        """The model, complete after `update_from_config`."""

        flavor: str = "hybrid-nano"
        config: DecoderConfig = MODELS["hybrid-nano"]
        compute_dtype: str = "bfloat16"
        recipe: str = "bf16"
        settings: tuple[str, ...] = ()
        seed: int = 0
        logged_every: int = 1

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """Take recipe, sizes and seed from torchtitan's config; raise ValueError for what is not supported."""
            for problem in problems(config):
                raise ValueError(problem)
            self.recipe, self.settings = config.fewbits.recipe, tuple(config.fewbits.settings)
            self.compute_dtype = config.training.mixed_precision_param
            self.seed, self.logged_every = config.debug.seed or 0, config.metrics.log_freq
            tokens = HuggingFaceTokenizer.Config().build(tokenizer_path=config.hf_assets_path).get_vocab_size()
            self.config = fitted(self.flavor, tokens, config.training.seq_len)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Return the number of parameters, and the FLOPs per token of forward and backward pass."""
            return sum(parameter.numel() for parameter in model.parameters()), flops_per_token(self.config, seq_len)

    def __init__(self, config: Config) -> None:
        Decoder.__init__(self, config.config, TORCH_DTYPE_MAP[config.compute_dtype])
        recipe = recipe_from_overrides(config.recipe, list(config.settings))
        if recipe.sampler.penalty:
            raise ValueError(
                f"sampler.penalty {recipe.sampler.penalty}: not supported in torchtitan {SUPPORTED}; set 0"
            )
        observer = LoggedSteps(config.logged_every)
        self.quantization = quantize(self, recipe, seed=config.seed, observer=observer, keep_weights=False)

    @property
    def layers(self) -> nn.Module:
        return self.blocks

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits. Positions are counted from the start of the sequence, not of a document in it."""
        return super().forward(tokens_BT)

    def verify_module_protocol(self) -> None:
        """Accept the layers, which are not torchtitan's: `init_weights` fills all of them."""

    def init_weights(self, **arguments: Any) -> None:
        initialise(self, arguments.get("buffer_device"))
        with torch.no_grad():
            for layer in self.quantization.layers:
                if layer.bit_scale is not None:
                    nn.init.ones_(layer.bit_scale)


def parallelize(
    model: TitanDecoder, *, parallel_dims: Any, parallelism: Any, ac_config: Any, dump_folder: str, **_: Any
) -> nn.Module:
    """Recompute blocks if the config says so, and shard the model: FSDP or HSDP, also over one rank."""
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    free = parallelism.fsdp_reshard_after_forward != "never"
    shard(model, parallel_dims.get_mesh(names), reshard_after_forward=free)
    return model


def problems(config: Any) -> Iterator[str]:
    """Yield a line for each setting of torchtitan that these models do not follow."""
    for name in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(config.parallelism, f"{name}_parallel_degree")
        if degree > 1:
            yield f"parallelism.{name}_parallel_degree {degree}: models of {NAME} support only FSDP and HSDP"
    if config.parallelism.spmd_backend != BACKEND:
        yield f"parallelism.spmd_backend {config.parallelism.spmd_backend}: set it to {BACKEND}"
    if not config.training.disable_cuda_graphs:
        yield "training.disable_cuda_graphs false: a CUDA graph repeats the seeds of one step; set it to true"
    if config.compile.enable and "model" in config.compile.components:
        yield f"compile.components includes model: models of {NAME} are not compiled; set compile.components=loss"
    if config.training.dtype != "float32":
        yield f"training.dtype {config.training.dtype}: parameters of {NAME} are FP32; set training.dtype=float32"
    if config.training.enable_cpu_offload:
        yield f"training.enable_cpu_offload: not supported for models of {NAME}; set it to false"


class NumericsProcessor(MetricsProcessor):  # type: ignore[misc]
    """A metrics processor that also logs numerics."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """The config of torchtitan's processor."""

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        # `numerics` expects the step after the one that is logged, as in 0.2.2, whose converter counts it first.
        for model in self.model_parts or []:
            model.quantization.begin(step)
        extra = (extra_metrics or {}) | numerics(self.model_parts or [])
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)


@dataclass(kw_only=True, slots=True)
class Fewbits:
    """The section `fewbits` of the config."""

    recipe: str = "bf16"
    """The name of a recipe, from `fewbits recipes`"""

    settings: list[str] = field(default_factory=list)
    """Changes of its settings and fields, like overrides without the prefix `recipe.`"""


class Trainer(torchtitan.trainer.Trainer):  # type: ignore[misc]
    """torchtitan's trainer, which tells the quantized layers the step, the micro-batch and the rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.trainer.Trainer.Config):  # type: ignore[misc]
        """torchtitan's config with the section `fewbits`."""

        fewbits: Fewbits = field(default_factory=Fewbits)

    def train_step(self, data_iterator: Any) -> None:
        self.micro_batch = 0
        super().train_step(data_iterator)

    def forward_backward_step(self, **arguments: Any) -> Tensor:
        step, rank = self.step - 1, 0
        if self.parallel_dims.dp_enabled:
            rank = self.parallel_dims.get_mesh("batch").get_local_rank()
        progress = step / self.config.training.steps
        self.model_parts[0].quantization.begin(step, self.micro_batch, rank=rank, progress=progress)
        self.micro_batch += 1
        return super().forward_backward_step(**arguments)


def config_of(flavor: str) -> Trainer.Config:
    """Return the default config for a model of the registry."""
    spec = ModelSpec(
        name=NAME,
        flavor=flavor,
        model=TitanDecoder.Config(flavor=flavor, config=MODELS[flavor]),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(),
        training=TrainingConfig(disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend=BACKEND),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        metrics=NumericsProcessor.Config(),
        checkpoint=CheckpointManager.Config(),
        activation_checkpoint=FullAC.Config(),
    )


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """Return the function that torchtitan calls for `--config NAME`."""
    if name in MODELS:
        return lambda: config_of(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; models are {', '.join(MODELS)}")
