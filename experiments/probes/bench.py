"""Hold a checkpoint's weights in models that share them: one unquantized, as the reference, and one for each recipe."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.experiments.optimization.precision import DTYPES
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.training import ROUNDING
from fewbits.experiments.trial import Trial
from fewbits.kernels.seeds import derive_seed
from fewbits.models.networks.decoder import Decoder
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.operand_pair import OperandPair
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import Recipe

_WIDTHS = ".bit_scale"


@dataclass(frozen=True, eq=False)
class Bench:
    """The checkpoint's weights in a model that is never changed, and in one that serves as the reference."""

    trial: Trial
    model: Decoder
    exact: Decoder
    widths: Mapping[str, Tensor]  # learned bit widths, if the trial has a sampler
    step: int
    origin: int

    def quantized(self, recipe: Recipe, batch: int, seed: int) -> tuple[Decoder, Quantization]:
        """Return a model with the same parameters and the recipe's layers, ready for a batch; seed 0 is the trial's.

        A sampler starts with the bit widths that the trial learned if its init, target and block are those of the
        trial's sampler, else with its own init.
        """
        t, ours, own = self.trial.training, recipe.sampler, self.trial.recipe.sampler
        rounding = self.trial.seed if t.rounding_seed is None else t.rounding_seed
        model = shared_copy(self.model)
        quantization = quantize(
            model,
            recipe,
            seed=derive_seed(rounding, ROUNDING, seed) if seed else derive_seed(rounding, ROUNDING),
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
        """Tell whether the recipe's results depend on the seed."""
        _, quantization = self.quantized(recipe, 0, 0)
        return any(
            layer.sampler is not None or any(pair.needs_seed for pair in operand_pairs(quantization, layer))
            for layer in quantization.layers
        )


def make_bench(trial: Trial, checkpoint: checkpoints.Checkpoint, device: torch.device, reference: torch.dtype) -> Bench:
    """Load the checkpoint's model and return it with its reference; the optimizer's state is not read."""
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
    """Return a copy of the model that shares its parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def backward(model: Decoder, inputs: Tensor, targets: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the loss without a sampler's penalty, and its gradient for every parameter except bit widths."""
    parameters = {name: p for name, p in model.named_parameters() if not name.endswith(_WIDTHS)}
    loss = model.loss(inputs, targets)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return float(loss.detach()), dict(zip(parameters, gradients, strict=True))


def operand_pairs(quantization: Quantization, layer: QuantizedLinear) -> tuple[OperandPair, OperandPair, OperandPair]:
    plan = layer.plans[quantization.context.switched]
    return plan.x, plan.w, plan.dy


def layer_labels(layer: QuantizedLinear) -> dict[str, Any]:
    return {"layer": layer.name, "block": layer.block, "part": layer.part}


def mean_bits(quantization: Quantization) -> float:
    widths = [bits.detach().flatten() for bits in (layer.bits for layer in quantization.layers) if bits is not None]
    return float(torch.cat(widths).double().mean()) if widths else math.nan
