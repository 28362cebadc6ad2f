"""Train fewbits' models with its recipes in torchtitan 0.3.0, which takes a config from a Python module.

    torchrun --nproc_per_node=8 -m torchtitan.train --module fewbits.experiments.torchtitan.v0_3 --config hybrid-8b \\
        --fewbits.recipe nvfp4 --fewbits.settings keep.last=2 --hf_assets_path ./assets/hf/Llama-3.1-8B

`--config` is the name of one of fewbits' models. torchtitan's own models are supported only with torchtitan 0.2.2
(fewbits.experiments.titan): version 0.3.0 builds them from a tree of configs, into which a recipe cannot be inserted.

torchtitan 0.3.0 captures a step in a CUDA graph unless `training.disable_cuda_graphs` is true. A graph replays the
kernels with the arguments of the captured step, so every step would use the seeds of this step. Therefore
`training.disable_cuda_graphs` is true by default here, and false is refused. If a loss is not finite, torchtitan ends
the run with an error before it logs the loss.
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
            f"this module needs torchtitan {SUPPORTED}, but the installed version is {installed}; for torchtitan 0.2.2 "
            "use fewbits.experiments.titan"
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
BACKEND = "partial_dtensor"  # the value of torchtitan's `spmd_backend` for sharding with torch's DTensors alone


class TitanDecoder(Decoder, BaseModel):  # type: ignore[misc]
    """A decoder that torchtitan builds from its config; its linear layers are quantized by the config's recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):  # type: ignore[misc]
        """The model's configuration and recipe; `update_from_config` completes it from torchtitan's config."""

        flavor: str = "hybrid-nano"
        config: DecoderConfig = MODELS["hybrid-nano"]
        compute_dtype: str = "bfloat16"
        recipe: str = "bf16"
        settings: tuple[str, ...] = ()
        seed: int = 0
        logged_every: int = 1

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """Set the fields of this class, except `flavor`, from torchtitan's config and tokenizer.

            Raise ValueError for settings that these models do not support.
            """
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
                f"sampler.penalty {recipe.sampler.penalty}: not supported in torchtitan {SUPPORTED}; set "
                "sampler.penalty=0"
            )
        observer = LoggedSteps(config.logged_every)
        self.quantization = quantize(self, recipe, seed=config.seed, observer=observer, keep_weights=False)

    @property
    def layers(self) -> nn.Module:
        return self.blocks

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits.

        The argument `positions` is ignored: the model counts positions from the start of each sequence, also if the
        sequence contains several documents.
        """
        return super().forward(tokens_BT)

    def verify_module_protocol(self) -> None:
        """Do nothing, instead of torchtitan's check that all submodules are of its class `Module`.

        fewbits' layers are not, and need not be, because `init_weights` of this class initialises all of them.
        """

    def init_weights(self, **arguments: Any) -> None:
        initialise(self, arguments.get("buffer_device"))
        with torch.no_grad():
            for layer in self.quantization.layers:
                if layer.bit_scale is not None:
                    nn.init.ones_(layer.bit_scale)


def parallelize(
    model: TitanDecoder, *, parallel_dims: Any, parallelism: Any, ac_config: Any, dump_folder: str, **_: Any
) -> nn.Module:
    """Apply activation checkpointing, and FSDP or HSDP (also for one rank), as torchtitan's config says.

    Return the model.
    """
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    free = parallelism.fsdp_reshard_after_forward != "never"
    shard(model, parallel_dims.get_mesh(names), reshard_after_forward=free)
    return model


def problems(config: Any) -> Iterator[str]:
    """Yield a message for each setting of torchtitan's config that fewbits' models do not support."""
    for name in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(config.parallelism, f"{name}_parallel_degree")
        if degree > 1:
            yield f"parallelism.{name}_parallel_degree {degree}: models of {NAME} support only FSDP and HSDP"
    if config.parallelism.spmd_backend != BACKEND:
        yield f"parallelism.spmd_backend {config.parallelism.spmd_backend}: set parallelism.spmd_backend={BACKEND}"
    if not config.training.disable_cuda_graphs:
        yield (
            "training.disable_cuda_graphs false: a CUDA graph would use the seeds of one step in every step; set "
            "training.disable_cuda_graphs=true"
        )
    if config.compile.enable and "model" in config.compile.components:
        yield f"compile.components includes model: models of {NAME} are not compiled; set compile.components=loss"
    if config.training.dtype != "float32":
        yield f"training.dtype {config.training.dtype}: parameters of {NAME} are FP32; set training.dtype=float32"
    if config.training.enable_cpu_offload:
        yield f"training.enable_cpu_offload: models of {NAME} do not support it; set training.enable_cpu_offload=false"


class NumericsProcessor(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics processor, which here also logs the metrics of `numerics` (torchtitan/numerics.py)."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """The config of torchtitan's processor, unchanged."""

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        # `numerics` reports the step before the layers' current step. In 0.2.2 the layers have advanced to the next
        # step when torchtitan logs; here they are advanced now.
        for model in self.model_parts or []:
            model.quantization.begin(step)
        extra = (extra_metrics or {}) | numerics(self.model_parts or [])
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)


@dataclass(kw_only=True, slots=True)
class Fewbits:
    """The section `fewbits` of torchtitan's config."""

    recipe: str = "bf16"
    """The name of a recipe, as `fewbits list recipes` lists them"""

    settings: list[str] = field(default_factory=list)
    """Overrides of the recipe's settings and fields, without the prefix `recipe.`, such as keep.last=2"""


class Trainer(torchtitan.trainer.Trainer):  # type: ignore[misc]
    """torchtitan's trainer, which here also sets the step context (step, micro-batch, rank) of the quantized layers."""

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
    """Return torchtitan's default config for the model with this name."""
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
    """Return a function that returns the default config of the model `name`; Python calls this for unknown attributes.

    For `--config NAME`, torchtitan calls the attribute NAME of this module as a function.
    """
    if name in MODELS:
        return lambda: config_of(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; models are {', '.join(MODELS)}")
