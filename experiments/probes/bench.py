"""Build models that share a checkpoint's weights: an unquantized one as the reference, and one for each recipe."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.experiments.optimization.precision import DTYPES
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.trial import ROUNDING, Trial
from fewbits.models.networks.decoder import Decoder
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.operand_pair import OperandPair
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import Recipe

_WIDTHS = ".bit_scale"


@dataclass(frozen=True, eq=False)
class Bench:
    """The models that a probe makes from a checkpoint; they share the same parameter tensors."""

    trial: Trial  # the trial that wrote the checkpoint
    model: Decoder  # unquantized, in the trial's dtype; copied for each recipe
    exact: Decoder  # unquantized, in the reference's dtype
    widths: Mapping[str, Tensor]  # learned bit widths by name; empty if the trial has no sampler
    step: int  # the checkpoint's step
    origin: int  # updates that the trial's ancestors made before the trial started; 0 if it is no branch

    def quantized(self, recipe: Recipe, batch: int, seed: int) -> tuple[Decoder, Quantization]:
        """Return a model with the checkpoint's parameters, quantized by a recipe for a batch, and its Quantization.

        batch: the batch's number, from 0, which determines the step and the micro-batch on which random numbers depend.
        seed: selects the random numbers; 0: those that the trial itself would use next.

        If init, target and block of the recipe's sampler equal those of the trial's sampler, the model has the bit
        widths that the trial learned. Otherwise every bit width is the recipe's `sampler.init`.
        """
        t, ours, own = self.trial.training, recipe.sampler, self.trial.recipe.sampler
        model = shared_copy(self.model)
        quantization = quantize(
            model,
            recipe,
            seed=self.trial.seed_for(ROUNDING, *([seed] if seed else [])),
            observer=Observer(ObserverConfig(window=1, every=1, gradients_every=0)),
        )
        if (ours.init, ours.target, ours.block) == (own.init, own.target, own.block):
            for layer in quantization.layers:
                if layer.bit_scale is not None and (learned := self.widths.get(layer.name + _WIDTHS)) is not None:
                    layer.bit_scale.data.copy_(learned)
        update, micro_batch = divmod(batch, t.batch // t.micro_batch)
        quantization.begin(self.origin + self.step + update, micro_batch, progress=self.step / t.steps)
        return model, quantization

    def draws_noise(self, recipe: Recipe) -> bool:
        """Tell whether the recipe uses random numbers, so that results depend on the seed."""
        _, quantization = self.quantized(recipe, 0, 0)
        return any(
            layer.sampler is not None or any(pair.needs_seed for pair in operand_pairs(quantization, layer))
            for layer in quantization.layers
        )


def make_bench(trial: Trial, checkpoint: checkpoints.Checkpoint, device: torch.device, reference: torch.dtype) -> Bench:
    """Load the model of a checkpoint, without the optimizer's state.

    reference: the dtype in which the unquantized model, the reference, computes.
    """
    state = checkpoint.state
    saved = checkpoints.unflatten(checkpoint.tensors(device, under="model."), state["model"])
    widths = {name: tensor for name, tensor in saved.items() if name.endswith(_WIDTHS)}
    with torch.device(device):
        model = Decoder(trial.model, DTYPES[trial.training.dtype])
    model.load_state_dict({name: tensor for name, tensor in saved.items() if name not in widths})
    exact = shared_copy(model)
    exact.compute_dtype = reference
    return Bench(trial, model, exact, widths, state["step"], state["origin"])


def shared_copy(model: Decoder) -> Decoder:
    """Return a copy of the model whose parameters and buffers are the same tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def backward(model: Decoder, inputs: Tensor, targets: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the cross entropy, and its gradient for every parameter except bit widths, by name.

    A sampler's penalty on bit widths is not part of this loss.
    """
    parameters = {name: p for name, p in model.named_parameters() if not name.endswith(_WIDTHS)}
    loss = model.loss(inputs, targets)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return float(loss.detach()), dict(zip(parameters, gradients, strict=True))


def operand_pairs(quantization: Quantization, layer: QuantizedLinear) -> tuple[OperandPair, OperandPair, OperandPair]:
    """Return a layer's OperandPair (a tensor's quantizers for its two GEMMs) for each of x, w and dy.

    If the recipe switches during training, the pairs are those that apply at the model's current step.
    """
    plan = layer.plans[quantization.context.switched]
    return plan.x, plan.w, plan.dy


def layer_labels(layer: QuantizedLinear) -> dict[str, Any]:
    """Return the columns that identify a layer in tables: its name, block number and part."""
    return {"layer": layer.name, "block": layer.block, "part": layer.part}
