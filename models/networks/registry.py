"""Build a model from its configuration or its name, and count its parameters.

Example: build(dataclasses.replace(MODELS["nemotron-nano"], layers=10), seed=1)
"""

from functools import cache

import torch

from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.initialise import initialise
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.presets import MODELS


def model(name: str) -> DecoderConfig:
    """Return the configuration with this name."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: valid names are {', '.join(MODELS)}")
    return MODELS[name]


def build(
    config: DecoderConfig | str,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype = torch.bfloat16,
) -> Decoder:
    """Build a model, from a configuration or name, with its initial parameters.

    For a given seed the parameters have the same bits on every device, and do not depend on other random numbers.
    """
    with torch.device(device):
        decoder = Decoder(model(config) if isinstance(config, str) else config, compute_dtype)
    initialise(decoder, seed)
    return decoder


def on_meta(config: DecoderConfig) -> Decoder:
    """Return the model on torch's meta device, without memory, to count its parameters and inspect its structure."""
    with torch.device("meta"):
        return Decoder(config)


def parameters(config: DecoderConfig) -> int:
    """Return how many parameters the model has; those of a tied head count once."""
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


@cache
def linear_parameters(config: DecoderConfig) -> int:
    """Return how many of the model's parameters are weights of linear layers in blocks, which recipes can quantize."""
    modules = on_meta(config).blocks.modules()
    return sum(module.weight.numel() for module in modules if isinstance(module, Linear))
