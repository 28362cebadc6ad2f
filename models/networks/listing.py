"""Describe a model in one line, for the list that `fewbits list models` prints."""

from fewbits.models.networks.decoder import DecoderConfig

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
    return ", ".join(
        [
            f"{config.layers} blocks" + (f" {config.pattern}" if config.pattern else "") + f" of width {config.width}",
            heads,
            f"{_LABELS[config.activation]} {config.ffn}",
            _LABELS[config.norm],
            positions,
            f"context {config.context}",
            f"vocabulary {config.vocab}" + (" tied" if config.tied else ""),
        ]
    )
