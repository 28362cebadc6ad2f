"""Build a model from a DecoderConfig or from a name in presets.py, and count its parameters.

Example: build(dataclasses.replace(MODELS["nemotron-nano"], layers=10), seed=1)
"""

import math
from dataclasses import replace
from functools import cache

import torch

from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.initialise import initialise
from fewbits.models.networks.layers import Linear
from fewbits.models.networks.presets import MODELS
from fewbits.models.weights import active_share, weights


def model(name: str) -> DecoderConfig:
    """Return the configuration of the model with this name; raise ValueError if there is none."""
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
    """Build a model from a configuration or a name, and initialise its parameters.

    compute_dtype: the dtype of activations; parameters are FP32. The seed alone determines the bits of the parameters,
    on every device.
    """
    with torch.device(device):
        decoder = Decoder(model(config) if isinstance(config, str) else config, compute_dtype)
    initialise(decoder, seed)
    return decoder


def on_meta(config: DecoderConfig) -> Decoder:
    """Return the model on torch's meta device (shapes without memory), to inspect its structure and parameters."""
    with torch.device("meta"):
        return Decoder(config)


def parameters(config: DecoderConfig) -> int:
    """Return how many parameters the model has; a weight that head and embedding share (tied) counts once."""
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


@cache
def linear_parameters(config: DecoderConfig) -> int:
    """Return the number of weights in linear layers of the model's blocks, the layers that recipes can quantize."""
    modules = on_meta(config).blocks.modules()
    return sum(module.weight.numel() for module in modules if isinstance(module, Linear) and module.part != "router")


def flops_per_token(config: DecoderConfig, length: int) -> int:
    """Return the FLOPs per token of a forward and a backward pass.

    These are 6 for each weight of a linear layer or the head (of experts, for those that read the token), plus
    12 · heads · head_dim · length for each attention layer, as if no position were masked.
    """
    attentions = "".join(config.blocks).count("*")
    return 6 * _active_matrices(config) + 12 * attentions * config.heads * config.head_dim * length


@cache
def _active_matrices(config: DecoderConfig) -> int:
    """Return the number of weights in linear layers, the head included, that a token reads."""
    model = on_meta(config)
    return round(sum(math.prod(weight.shape) * active_share(model, weight) for weight in weights(model)))


def with_vocab(config: DecoderConfig, tokens: int) -> DecoderConfig | None:
    """Return the configuration with a vocabulary of at least this number of tokens; None if it cannot be enlarged.

    Only a model of MODELS named `…-nano` that has its own vocabulary is enlarged, to a multiple of 64.
    """
    if config.vocab >= tokens:
        return config
    preset = MODELS.get(config.name)
    if preset is None or not preset.name.endswith("-nano") or config.vocab != preset.vocab:
        return None
    return replace(config, vocab=-(-tokens // 64) * 64)


_LABELS = {
    "gelu": "GELU",
    "swiglu": "SwiGLU",
    "relu2": "squared ReLU",
    "layernorm": "LayerNorm",
    "layernorm1p": "LayerNorm1p",
    "rmsnorm": "RMSNorm",
    "learned": "learned positions",
    "none": "no positions",
}


def describe(config: DecoderConfig) -> str:
    """Describe a model in one line, such as `12 blocks of width 768, 12 heads, SwiGLU 2048, RMSNorm, RoPE, …`."""
    heads = f"{config.heads} heads"
    if config.kv_heads < config.heads:
        heads += f" on {config.kv_heads}"
    if config.positions == "rope":
        positions = "RoPE" if config.rope_fraction == 1 else f"RoPE on {config.rope_fraction:.0%}"
    else:
        positions = _LABELS[config.positions]
    experts = f" of {config.active_experts} of {config.experts} experts" if config.experts else ""
    experts += f" and a shared one of {config.shared_ffn}" if config.experts and config.shared_ffn else ""
    return ", ".join(
        [
            f"{config.layers} blocks" + (f" {config.pattern}" if config.pattern else "") + f" of width {config.width}",
            heads,
            f"{_LABELS[config.activation]} {config.ffn}{experts}",
            _LABELS[config.norm],
            positions,
            f"context {config.context}",
            f"vocabulary {config.vocab}" + (" tied" if config.tied else ""),
        ]
    )
