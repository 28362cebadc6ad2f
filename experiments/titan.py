"""Train with fewbits' recipes in torchtitan: a model converter, and the section `[fewbits]` of torchtitan's config.

    [job]
    custom_config_module = "fewbits.experiments.titan"
    [model]
    converters = ["fewbits"]
    [fewbits]
    recipe = "nvfp4"
    settings = ["keep.last=2"]

or, on torchtitan's command line: `--job.custom_config_module fewbits.experiments.titan --model.converters fewbits
--fewbits.recipe nvfp4`. fewbits' own models are torchtitan's train spec `fewbits` (titan_models.py).

torchtitan lets converters change the model before it shards it and creates the optimizer, so its optimizer and
checkpoints include the parameters that a recipe's sampler adds. Noise is derived from the seed (`debug.seed`), the
step, the micro-batch, the data-parallel rank and the layer. A resumed run learns its step from the train state, which
torchtitan passes with the weights to the model's `load_state_dict`; converters have no other way to learn it.
"""

# No `from __future__ import annotations`: torchtitan reads the types of the dataclasses below.
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fewbits.experiments.config import recipe_from_overrides
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import Recipe

SUPPORTED = "0.2.2"


def _check_version() -> None:
    """Raise ImportError unless torchtitan has the version SUPPORTED; other versions have other extension points."""
    try:
        installed = version("torchtitan")
    except PackageNotFoundError:
        installed = "none"
    if installed != SUPPORTED:
        raise ImportError(
            f"fewbits needs torchtitan {SUPPORTED}, but {installed} is installed: pip install 'fewbits[titan]'"
        )


_check_version()

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.models.llama3 import get_train_spec as llama3  # noqa: E402
from torchtitan.models.qwen3 import get_train_spec as qwen3  # noqa: E402
from torchtitan.protocols.model_converter import register_model_converter  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec  # noqa: E402

from fewbits.experiments import titan_models  # noqa: E402

NAME = "fewbits"
DENSE = {"llama3": llama3, "qwen3": qwen3}  # torchtitan's own models whose blocks consist of nn.Linear
TRACED = ("simple_fsdp.", "compiler_toolkit.", "autoparallel.")  # torchtitan's experiments that trace the model


@dataclass
class Fewbits:
    """The section `[fewbits]` of torchtitan's config."""

    recipe: str = ""
    """The name of a recipe that `fewbits list recipes` lists"""

    settings: list[str] = field(default_factory=list)
    """Changes of the recipe, written as overrides without their prefix `recipe.`: keep.last=2,rht=32"""


@dataclass
class JobConfig:
    """The fields that torchtitan merges into its own config class, because `custom_config_module` names this module."""

    fewbits: Fewbits = field(default_factory=Fewbits)


class FewbitsConverter:
    """A model converter for torchtitan, which quantizes the model's linear layers by the recipe of `[fewbits]`."""

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        section = getattr(job_config, NAME, None)
        if section is None:
            setting = f'custom_config_module = "{__name__}" in [job], and recipe in [{NAME}]'
            raise ValueError(f"the converter {NAME} needs a recipe: in the config of torchtitan, set {setting}")
        self.recipe = recipe_from_overrides(section.recipe, split(section.settings))
        for problem in problems(job_config, parallel_dims, self.recipe):
            raise ValueError(problem)
        self.config = job_config
        self.sharded = parallel_dims.fsdp_enabled
        self.rank, self.ranks = 0, 1  # data-parallel rank: each rank reads its own tokens and draws its own noise
        if parallel_dims.dp_enabled:
            mesh = parallel_dims.get_mesh("batch")
            self.rank, self.ranks = mesh.get_local_rank(), mesh.size()

    def convert(self, model: nn.Module) -> None:
        """Quantize the model, and register hooks that count micro-batches and read the step of a loaded checkpoint."""
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3:
                raise ValueError(f"{name} holds the weights of experts: models with experts are not supported")
        # An observer, if the model's train spec logs quantization errors by `build_metrics_processor`.
        logged = get_train_spec(self.config.model.name).build_metrics_processor_fn is build_metrics_processor
        observer = LoggedSteps(self.config.metrics.log_freq) if logged else None
        seed = self.config.debug.seed or 0
        self.quantization = quantize(model, self.recipe, seed=seed, observer=observer, keep_weights=not self.sharded)
        self._step(0)
        model.register_forward_pre_hook(self._forward)
        model.register_load_state_dict_pre_hook(self._load)
        if self.recipe.sampler.kind != "none":
            self._initialise_with(model)
        if self.recipe.sampler.penalty:
            for layer in self.quantization.layers:
                if layer.sampler is not None:
                    layer.register_forward_hook(self._penalise)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Begin the next step, because noise depends on the step, and a recipe may switch quantizers at a step."""
        self._step(self.quantization.context.step + 1)

    def _step(self, step: int) -> None:
        self.micro_batches = 0
        self._begin(step, 0)

    def _forward(self, model: nn.Module, _: object) -> None:
        if model.training and torch.is_grad_enabled():  # no validation
            self._begin(self.quantization.context.step, self.micro_batches)
            self.micro_batches += 1

    def _begin(self, step: int, micro_batch: int) -> None:
        progress = step / self.config.training.steps
        self.quantization.begin(step, micro_batch, rank=self.rank, progress=progress)

    def _load(self, model: nn.Module, state: Mapping[str, Any], *_: object) -> None:
        """Set the step to that of `train_state` in the dictionary from which torchtitan loads the model, or to 0."""
        train_state = state.get("train_state")
        self._step(0 if train_state is None else train_state.step)

    def _initialise_with(self, model: Any) -> None:
        """Make the model's method `init_weights` also set `bit_scale` of each layer with a sampler to 1."""
        original = model.init_weights

        def init_weights(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            for layer in self.quantization.layers:
                if layer.bit_scale is not None:
                    nn.init.ones_(layer.bit_scale)

        model.init_weights = init_weights

    def _penalise(self, layer: QuantizedLinear, _: object, y: Tensor) -> Tensor:
        """Return the layer's output y, whose backward pass also computes the gradient of the layer's penalty.

        The penalty on learned bit widths (GaussWS eq. 12) belongs to the loss, but torchtitan's loss cannot include it.
        """
        bits, sampler = layer.bits, layer.sampler
        if bits is None or sampler is None or not (layer.training and torch.is_grad_enabled()):
            return y
        if self.quantization.context.micro_batch:
            return y  # the penalty is added once for each update
        term = sampler.penalty * (bits - sampler.target).abs().mean() / self.ranks
        return _AddedToLoss.apply(y, term)


class _AddedToLoss(torch.autograd.Function):
    """An identity operation on y. Its backward pass computes gradients as if `term` were added to the loss."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(term)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, torch.ones_like(ctx.saved_tensors[0])


# ---- unsupported combinations


def split(settings: Sequence[str]) -> list[str]:
    """Return a recipe's settings, one string each; torchtitan splits its list at every comma, also inside brackets."""
    not_inside_brackets = r",(?![^\[{(]*[\]})])"
    return [part.strip() for part in re.split(not_inside_brackets, ",".join(settings)) if part]


def problems(config: Any, dims: Any, recipe: Recipe) -> Iterator[str]:
    """Yield a message for each reason why a torchtitan job with this config could not follow the recipe."""
    yield from titan_models.unsupported(config)
    if quantizers := [name for name in config.model.converters if name.startswith("quantize.")]:
        yield f"model.converters: {', '.join(quantizers)} would quantize the layers of {NAME} again; use one of them"
    if config.fault_tolerance.enable:
        yield "fault_tolerance.enable: a joining replica does not get the step, which sets the noise; disable it"
    if config.model.name.startswith(TRACED):
        yield f"model.name {config.model.name}: this experiment of torchtitan traces the layers; use for example llama3"
    # FSDP gathers copies of torchtitan's models in this dtype, but our models in FP32 (see titan_models.py).
    bf16 = config.training.mixed_precision_param != "float32" and config.model.name != titan_models.NAME
    if dims.fsdp_enabled and bf16 and recipe.wgrad.output == "fp32":
        yield (
            f"recipe {recipe.name} has weight gradients in FP32, but FSDP gathers weights, and so their gradients, in "
            f"{config.training.mixed_precision_param}: set wgrad.output=bf16 in {NAME}.settings, or "
            "training.mixed_precision_param=float32"
        )
    if recipe.sampler.kind == "none":
        return
    if config.training.dtype != "float32" or (dims.fsdp_enabled and bf16):
        key = "dtype" if config.training.dtype != "float32" else "mixed_precision_param"
        yield (
            f"training.{key} {getattr(config.training, key)}: recipe {recipe.name} adds its noise to FP32 weights"
            f"{', which FSDP rounds' if key != 'dtype' else ''}; set training.{key}=float32"
        )
    for key in ("initial_load_in_hf", "last_save_in_hf"):
        if getattr(config.checkpoint, key):
            yield f"checkpoint.{key}: Hugging Face's format cannot store the bit widths of recipe {recipe.name}"


# ---- metrics


class LoggedSteps(Observer):
    """An observer that measures quantizers outside mixtures only in the steps that torchtitan logs."""

    def __init__(self, interval: int) -> None:
        super().__init__(ObserverConfig(every=interval, gradients_every=0))

    def watches(self, step: int) -> bool:
        return step == 0 or (step + 1) % self.config.every == 0


def numerics(models: Sequence[nn.Module]) -> dict[str, float]:
    """Return metrics of this rank's tokens since the last call, by name; empty if no quantized layer is observed.

    `fewbits/COLUMN/SLOT` is the mean over layers of a column of the observer's rows (docs/columns.md), and
    `fewbits/error_max/SLOT` the largest error of any layer. `fewbits/bits_mean`, `_min` and `_max` are bit widths.
    """
    layers = [module for model in models for module in model.modules() if isinstance(module, QuantizedLinear)]
    quantization = layers[0].owner[0] if layers else None
    if not isinstance(quantization, Quantization) or quantization.observer is None:
        return {}
    rows = quantization.observer.rows(quantization.context.step - 1, layers, weights=False)
    metrics: dict[str, float] = {}
    for slot in dict.fromkeys(row["slot"] for row in rows):
        of_slot = [row for row in rows if row["slot"] == slot]
        for column in ("error", "flushed", "saturated", "share_0", "share_1", "share_2", "share_3"):
            values = [row[column] for row in of_slot if column in row]
            if values:
                metrics[f"{NAME}/{column}/{slot}"] = sum(values) / len(values)
        metrics[f"{NAME}/error_max/{slot}"] = max(row["error_max"] for row in of_slot)
    return metrics | _bit_widths(layers)


def _bit_widths(layers: Sequence[QuantizedLinear]) -> dict[str, float]:
    with torch.no_grad():
        bits = [
            b.full_tensor() if isinstance(b, DTensor) else b for b in (layer.bits for layer in layers) if b is not None
        ]
    if not bits:
        return {}
    widths = torch.cat([b.flatten() for b in bits])
    return {f"{NAME}/bits_{name}": float(getattr(widths, name)()) for name in ("mean", "min", "max")}


class NumericsProcessor(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics processor, which also logs quantization errors, to TensorBoard or Weights & Biases."""

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        extra = (extra_metrics or {}) | numerics(self.model_parts or [])
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)


def build_metrics_processor(
    job_config: Any, parallel_dims: Any, model_args: Any = None, tag: str | None = None
) -> MetricsProcessor:
    """Return a NumericsProcessor; ValueError if the config names a recipe but not the converter `fewbits`."""
    section = getattr(job_config, NAME, None)
    if section is not None and section.recipe and NAME not in job_config.model.converters:
        raise ValueError(f"{NAME}.recipe {section.recipe}: this recipe is not applied; add {NAME} to model.converters")
    return NumericsProcessor(job_config, parallel_dims, tag)


register_model_converter(FewbitsConverter, NAME)
for _name, _spec in DENSE.items():
    register_train_spec(_name, replace(_spec(), build_metrics_processor_fn=build_metrics_processor))
register_train_spec(titan_models.NAME, titan_models.train_spec(build_metrics_processor))
