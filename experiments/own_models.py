"""Quantize any module by the name of a recipe: the public `quantize`."""

from __future__ import annotations

from torch import nn

from fewbits.experiments.config import load_recipe
from fewbits.models import quantize as models
from fewbits.models.observer import Observer
from fewbits.models.recipe import Recipe


def quantize(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    seed: int = 0,
    observer: Observer | None = None,
    keep_weights: bool = True,
) -> models.Quantization:
    """Replace the linear layers of the model's blocks, in place, by quantized ones with the same parameters.

    Create optimizers afterwards, because a sampler adds a parameter `bit_scale` to every layer with noise.
    recipe: a recipe, its name (from `fewbits list recipes`), or the path of a YAML file.
    seed: the rounding seed, from which the seeds of stochastic rounding, noise and rotation signs are derived.
    observer: collects statistics of the quantized operands.
    keep_weights: True quantizes and casts each weight once per update and keeps the result; False does so in every
        forward and backward pass, to save memory.

    >>> quantization = quantize(model, "nvfp4")
    >>> quantization.attach(model, optimizer)   # or quantization.begin(step) before every forward
    >>> print(quantization)                     # how much is quantized, and what is not
    """
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return models.quantize(model, chosen, seed=seed, observer=observer, keep_weights=keep_weights)
