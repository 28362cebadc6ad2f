"""List the models of the papers (MoR, NVFP4, GaussWS) by name, and a small model of each family for CPUs.

The `-nano` models have the same kinds of layers as their family, at the smallest size at which the quantization blocks
`128x128`, `channel` and `tensor` still differ: width 256, so that every operand of every linear layer has at least 4
blocks of 128x128. They have more than 4 decoder blocks, so that a recipe can keep the last 4 in high precision. The
vocabulary is the 256 bytes; for another tokenizer, replace `vocab`. A new model here changes no trial's id, because an
id depends only on the values of the trial's own model.
"""

from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from fewbits.models.networks.decoder import DecoderConfig


def _sizes(
    vocab: int, width: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, context: int
) -> dict[str, Any]:
    """Return these fields of DecoderConfig by name."""
    return locals()


# GaussWS: nanoGPT 9755682b. The vocabulary is GPT-2's 50257 padded to a multiple of 64.
_GPT2 = DecoderConfig(
    name="gpt2-124m",
    **_sizes(50304, 768, 12, 12, 12, 64, 3072, 1024),
    activation="gelu",
    norm="layernorm",
    positions="learned",
    tied=True,
)

# GaussWS: the presets of Adam-mini's fork of torchtitan, with seven linear layers per block.
_LLAMA2 = DecoderConfig(
    name="llama2-134m",
    # vocab: assumed for C4, because it gives the published number of parameters
    **_sizes(32000, 768, 12, 12, 12, 64, 2048, 2048),
    activation="swiglu",
    fused_qkv=False,
    init="llama",
)

# MoR: Nemotron-3 8B's published configuration, with four linear layers per block.
_NEMOTRON3 = DecoderConfig(
    name="nemotron3-8b",
    # context: of the published model; assumed for MoR's runs
    **_sizes(256000, 4096, 32, 32, 32, 128, 16384, 4096),
    norm="layernorm1p",
    rope_fraction=0.5,
    init_std=0.0134,  # assumed: the default of the Nemotron family in transformers
)

# NVFP4: the Transformer of the paper's ablations. RoPE's θ and fraction and the initial standard deviation are assumed.
_NVFP4 = DecoderConfig(
    name="nvfp4-1.2b",
    **_sizes(131072, 2048, 20, 16, 8, 128, 6144, 8192),
)

# NVFP4: the Nemotron-H family. It has no position embeddings, because Mamba-2 already depends on the order of tokens.
_HYBRID_8B = DecoderConfig(
    name="hybrid-8b",
    **_sizes(131072, 4096, 52, 32, 4, 128, 21504, 8192),
    positions="none",
    pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
)
_HYBRID_12B = replace(
    _HYBRID_8B,
    name="hybrid-12b",
    **_sizes(131072, 5120, 62, 40, 8, 128, 20480, 8192),
    pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
)

# A mixture of experts with the sizes of OLMoE-1B-7B (arXiv 2409.02060), 1.3 of 6.9 billion parameters of which are
# active, but without its norms of queries and keys, and with the router of Mixtral.
_MOE = replace(
    _LLAMA2,
    name="moe-1b-7b",
    **_sizes(50304, 2048, 16, 16, 16, 128, 1024, 4096),
    experts=64,
    active_experts=8,
)

# A published model, to probe recipes at trained weights: `fewbits import smollm2`.
_SMOLLM2 = replace(
    _LLAMA2,
    name="smollm2-135m",
    **_sizes(49152, 576, 30, 9, 3, 64, 1536, 8192),
    rope_theta=100000.0,
    tied=True,
)


def _nano(config: DecoderConfig, name: str, **changes: Any) -> DecoderConfig:
    """Return `config` with another name, the sizes of `-nano` models (see the module's docstring), and `changes`.

    changes: values for further fields of DecoderConfig, or for sizes that differ from those of other `-nano` models.
    """
    sizes = {"vocab": 256, "width": 256, "layers": 6, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 512}
    return replace(config, name=name, **{**sizes, "context": 256, **changes})


_ALL = (
    _GPT2,
    _LLAMA2,
    replace(_LLAMA2, name="llama2-1b", width=2048, layers=18, heads=16, kv_heads=16, head_dim=128, ffn=5632),
    # The dimensions are not published. These are assumed, because they fit the memory use in GaussWS Table 1 best.
    replace(_LLAMA2, name="llama2-3b", width=3072, layers=28, heads=24, kv_heads=24, head_dim=128, ffn=8192),
    replace(_LLAMA2, name="llama2-70b-4l", width=8192, layers=4, heads=64, kv_heads=8, head_dim=128, ffn=28672),
    replace(_LLAMA2, name="llama2-70b", width=8192, layers=80, heads=64, kv_heads=8, head_dim=128, ffn=28672),
    _NEMOTRON3,
    _NVFP4,
    _HYBRID_8B,
    _HYBRID_12B,
    _SMOLLM2,
    _MOE,
    _nano(_GPT2, "gpt2-nano"),
    _nano(_LLAMA2, "llama2-nano"),
    _nano(_NEMOTRON3, "nemotron-nano", init_std=0.02),
    _nano(_MOE, "moe-nano", ffn=256, experts=4, active_experts=2),
    _nano(
        _HYBRID_8B,
        "hybrid-nano",
        layers=13,
        pattern="M-M*-M-M-M-M-",  # the beginning, middle and end of the published patterns
        mamba_groups=2,
        mamba_state=32,
        kv_heads=2,
    ),
)

MODELS: Final = MappingProxyType({config.name: config for config in _ALL})
