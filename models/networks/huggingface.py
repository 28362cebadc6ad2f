"""Express a decoder as one of transformers' models: its configuration and its weights under their names.

| ours | class of transformers |
|---|---|
| GELU, LayerNorm, learned positions | GPT2LMHeadModel |
| SwiGLU, RMSNorm, RoPE on whole heads | LlamaForCausalLM |
| squared ReLU, LayerNorm1p, RoPE | NemotronForCausalLM |
| squared ReLU, RMSNorm, RoPE on whole heads | ArceeForCausalLM |

They compute the same function; sums are in another order. transformers rotates the dimensions (i, i + n/2) of a head
and we rotate neighbours, so the rows of W_q and W_k are reordered. GPT-2's matrices are transposed, and its layers
have biases: zeros, where ours have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fewbits.models.networks.decoder import DecoderConfig

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A class of transformers: the decoders that it can be, and how their configuration and weights are expressed."""

    architecture: str
    activation: str
    norm: str
    positions: str
    whole_heads: bool  # RoPE has to rotate all dimensions of a head
    config: Callable[[DecoderConfig], dict[str, Any]]
    weights: Callable[[DecoderConfig, Mapping[str, Tensor]], Weights]

    def fits(self, config: DecoderConfig) -> bool:
        kinds = (config.activation, config.norm, config.positions)
        rotated = not self.whole_heads or config.rope_fraction == 1
        return kinds == (self.activation, self.norm, self.positions) and rotated


def family_of(config: DecoderConfig) -> Family:
    """Return the class of transformers that computes the same function; raise ValueError if there is none."""
    if "M" in config.pattern:
        raise ValueError(
            f"model {config.name} has Mamba-2 layers, and transformers' own bound their Δ from below, which ours do "
            "not, so the logits would differ"
        )
    if config.pattern:
        raise ValueError(f"model {config.name} has blocks of the pattern {config.pattern}, which transformers lacks")
    for family in FAMILIES:
        if family.fits(config):
            if family.architecture == "GPT2LMHeadModel" and not _is_plain(config):
                raise ValueError(f"model {config.name}: transformers' GPT-2 has heads·head_dim = width and no kv_heads")
            return family
    kinds = f"{config.activation}, {config.norm}, positions {config.positions}"
    if config.positions == "rope":
        kinds += f" on {config.rope_fraction:.0%} of a head"
    valid = "; ".join(f"{f.activation}, {f.norm}, {f.positions}" for f in FAMILIES)
    raise ValueError(f"model {config.name} has {kinds}, and transformers has no such model; it has {valid}")


def to_huggingface(
    config: DecoderConfig, state: Mapping[str, Tensor], end: int | None = None
) -> tuple[dict[str, Any], Weights]:
    """Return the content of config.json, and the weights, of a decoder with this state_dict.

    end: the token between documents. Learned bit widths are left out.
    """
    family = family_of(config)
    content = {
        "architectures": [family.architecture],
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": "float32",
        "torch_dtype": "float32",  # its name before transformers 5
        **family.config(config),
    }
    weights = family.weights(config, state)
    if not config.tied:
        weights["lm_head.weight"] = state["head.weight"]
    return content, {name: tensor.float().contiguous() for name, tensor in weights.items()}


# ------------------------------------------------------------------------------------------------ GPT-2


def _is_plain(config: DecoderConfig) -> bool:
    return config.heads == config.kv_heads and config.heads * config.head_dim == config.width


def _gpt2_config(config: DecoderConfig) -> dict[str, Any]:
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return dropout | {
        "model_type": "gpt2",
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.ffn,
        "activation_function": "gelu",
        "layer_norm_epsilon": config.norm_eps,
    }


def _gpt2_weights(config: DecoderConfig, state: Mapping[str, Tensor]) -> Weights:
    weights = {"transformer.wte.weight": state["embed.weight"], "transformer.wpe.weight": state["positions.weight"]}
    weights |= _named("transformer.ln_f", *_with_bias(state, "norm"))
    for block in range(config.layers):
        ours, theirs = f"blocks.{block}.", f"transformer.h.{block}."
        weights |= _named(f"{theirs}ln_1", *_with_bias(state, f"{ours}attention_norm"))
        weights |= _named(f"{theirs}ln_2", *_with_bias(state, f"{ours}ffn_norm"))
        qkv = _joined(_queries_keys_values(config, state, f"{ours}attention."))
        for name, (weight, bias) in (
            ("attn.c_attn", qkv),
            ("attn.c_proj", _with_bias(state, f"{ours}attention.out")),
            ("mlp.c_fc", _with_bias(state, f"{ours}ffn.up")),
            ("mlp.c_proj", _with_bias(state, f"{ours}ffn.down")),
        ):
            weights |= _named(theirs + name, weight.mT, bias)
    return weights


def _with_bias(state: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    weight = state[f"{name}.weight"]
    bias = state.get(f"{name}.bias")
    return weight, weight.new_zeros(len(weight)) if bias is None else bias


def _joined(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    weight = torch.cat([weight for weight, _ in parts])
    biases = [bias for _, bias in parts if bias is not None]
    return weight, torch.cat(biases) if biases else weight.new_zeros(len(weight))


# ------------------------------------------------------------------------------------------------ Llama and its kin


def _rope_config(kind: str, activation: str, eps: str, config: DecoderConfig) -> dict[str, Any]:
    rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.rope_fraction}
    return {
        "model_type": kind,
        "hidden_size": config.width,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": activation,
        "max_position_embeddings": config.context,
        eps: config.norm_eps,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        **rope,  # where versions before transformers 5 read them
        "rope_parameters": {"rope_type": "default", **rope},
    }


def _rope_weights(config: DecoderConfig, state: Mapping[str, Tensor]) -> Weights:
    weights = {"model.embed_tokens.weight": state["embed.weight"]} | _renamed(state, "norm", "model.norm")
    names = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.out": "self_attn.o_proj",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    }
    for block in range(config.layers):
        ours, theirs = f"blocks.{block}.", f"model.layers.{block}."
        for name, their_name in names.items():
            weights |= _renamed(state, ours + name, theirs + their_name)
        parts = _queries_keys_values(config, state, f"{ours}attention.")
        for name, pair in zip("qkv", parts, strict=True):
            weight, bias = (_halves(config, rows) if name != "v" else rows for rows in pair)
            assert weight is not None
            weights |= _named(f"{theirs}self_attn.{name}_proj", weight, bias)
    return weights


def _halves(config: DecoderConfig, rows: Tensor | None) -> Tensor | None:
    """Reorder the rows of W_q, W_k or their biases from rotating neighbours (2i, 2i + 1) to halves (i, i + n/2)."""
    if rows is None:
        return None
    rotated = int(config.head_dim * config.rope_fraction)
    order = torch.arange(config.head_dim)
    order[:rotated] = order[:rotated].view(-1, 2).T.flatten()
    return rows.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)


def _renamed(state: Mapping[str, Tensor], ours: str, theirs: str) -> Weights:
    return {f"{theirs}.{part}": state[key] for part in ("weight", "bias") if (key := f"{ours}.{part}") in state}


# ------------------------------------------------------------------------------------------------ both


def _queries_keys_values(
    config: DecoderConfig, state: Mapping[str, Tensor], prefix: str
) -> list[tuple[Tensor, Tensor | None]]:
    """Return weight and bias of the queries, the keys and the values, which may be rows of one layer."""
    if not config.fused_qkv:
        return [(state[f"{prefix}{name}.weight"], state.get(f"{prefix}{name}.bias")) for name in "qkv"]
    sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
    bias = state.get(f"{prefix}qkv.bias")
    biases = [None] * 3 if bias is None else bias.split(sizes)
    return list(zip(state[f"{prefix}qkv.weight"].split(sizes), biases, strict=True))


def _named(name: str, weight: Tensor, bias: Tensor | None) -> Weights:
    return {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})


def _like_llama(
    architecture: str, kind: str, ours: tuple[str, str], act: str, eps: str, whole_heads: bool = True
) -> Family:
    def config(decoder: DecoderConfig) -> dict[str, Any]:
        return _rope_config(kind, act, eps, decoder)

    return Family(architecture, *ours, "rope", whole_heads, config, _rope_weights)


FAMILIES: Final = (
    Family("GPT2LMHeadModel", "gelu", "layernorm", "learned", False, _gpt2_config, _gpt2_weights),
    _like_llama("LlamaForCausalLM", "llama", ("swiglu", "rmsnorm"), "silu", "rms_norm_eps"),
    _like_llama("NemotronForCausalLM", "nemotron", ("relu2", "layernorm1p"), "relu2", "norm_eps", whole_heads=False),
    _like_llama("ArceeForCausalLM", "arcee", ("relu2", "rmsnorm"), "relu2", "rms_norm_eps"),
)
