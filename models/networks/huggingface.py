"""Convert a decoder to a model of the library transformers: its config.json and its weights by transformers' names.

| decoder of fewbits | class of transformers |
|---|---|
| GELU, LayerNorm, learned positions | GPT2LMHeadModel |
| SwiGLU, RMSNorm, RoPE on whole heads | LlamaForCausalLM; with experts, MixtralForCausalLM |
| squared ReLU, LayerNorm1p, RoPE | NemotronForCausalLM |
| squared ReLU, RMSNorm, RoPE on whole heads | ArceeForCausalLM |

The decoder and its converted model compute the same function, with sums in another order. transformers' RoPE rotates
the dimensions (i, i + n/2) of a head together, and fewbits' RoPE rotates (2i, 2i + 1), so the rows of W_q and W_k are
reordered. The matrices of GPT-2's blocks are transposed. All layers of transformers' GPT-2 have biases: they are set to
0 if the decoder has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from fewbits.models.networks.decoder import DecoderConfig

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Family:
    """A model class of the library transformers, the decoders that it can represent, and how to convert them.

    activation, norm, positions: the values that these fields of DecoderConfig must have.
    whole_heads: True if RoPE must rotate all dimensions of each head (`rope_fraction` = 1).
    """

    architecture: str  # the name of the class
    activation: str
    norm: str
    positions: str
    whole_heads: bool  # True: rope_fraction must be 1
    experts: bool = field(
        default=False, kw_only=True
    )  # True: a mixture of experts takes the feed-forward layer's place
    config: Callable[[DecoderConfig], dict[str, Any]]  # returns the family's own fields of config.json
    # Given a decoder's configuration and state_dict, return its weights by transformers' names.
    weights: Callable[[DecoderConfig, Mapping[str, Tensor]], Weights]

    def fits(self, config: DecoderConfig) -> bool:
        kinds = (config.activation, config.norm, config.positions)
        rotated = not self.whole_heads or config.rope_fraction == 1
        experts = self.experts == bool(config.experts)
        return kinds == (self.activation, self.norm, self.positions) and rotated and experts


def family_of(config: DecoderConfig) -> Family:
    """Return the Family whose class computes the same function as the decoder; raise ValueError if there is none."""
    if "M" in config.pattern:
        raise ValueError(
            f"model {config.name} has Mamba-2 layers, which cannot be exported: transformers' Mamba-2 bounds the step "
            "size Δ from below and fewbits' does not, so the logits would differ"
        )
    if config.pattern:
        raise ValueError(
            f"model {config.name} cannot be exported: its blocks have the pattern {config.pattern}, for which "
            "transformers has no class"
        )
    if config.experts and (config.shared_ffn or config.bias):
        raise ValueError(
            f"model {config.name} cannot be exported: transformers' Mixtral has no shared expert and no biases; set "
            "model.shared_ffn=0 and model.bias=false"
        )
    for family in FAMILIES:
        if family.fits(config):
            if family.architecture == "GPT2LMHeadModel" and not _gpt2_supports_heads(config):
                raise ValueError(
                    f"model {config.name} cannot be exported: transformers' GPT-2 requires heads·head_dim = width and "
                    "kv_heads = heads"
                )
            return family
    kinds = f"{config.activation}, {config.norm}, positions {config.positions}"
    if config.positions == "rope":
        kinds += f" on {config.rope_fraction:.0%} of a head"
    kinds += ", experts" if config.experts else ""
    valid = "; ".join(f"{f.activation}, {f.norm}, {f.positions}" + ", experts" * f.experts for f in FAMILIES)
    raise ValueError(
        f"model {config.name} cannot be exported: it has {kinds}, but transformers has classes only for: {valid}"
    )


def to_huggingface(
    config: DecoderConfig, state: Mapping[str, Tensor], end: int | None = None
) -> tuple[dict[str, Any], Weights]:
    """Return the content of config.json and the weights by transformers' names, in FP32 unless they are integers.

    state: the decoder's state_dict; learned bit widths in it are not exported. end: the id of the token between
    documents; None: there is none.
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
        "torch_dtype": "float32",  # the name of the field `dtype` before transformers 5
        **family.config(config),
    }
    weights = family.weights(config, state)
    if not config.tied:
        weights["lm_head.weight"] = state["head.weight"]
    return content, {
        name: (tensor.float() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in weights.items()
    }


# ------------------------------------------------------------------------------------------------ GPT-2


def _gpt2_supports_heads(config: DecoderConfig) -> bool:
    """Tell whether kv_heads = heads and heads·head_dim = width, which transformers' GPT-2 requires."""
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
    """Return a layer's weight and bias; if the state_dict has no bias of this layer, zeros in its place."""
    weight = state[f"{name}.weight"]
    bias = state.get(f"{name}.bias")
    return weight, weight.new_zeros(len(weight), dtype=torch.float32) if bias is None else bias


def _joined(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor]:
    """Return the concatenated weights and the concatenated biases of several layers.

    parts: (weight, bias) of each layer. All layers must have a bias, or none; if none has, the biases are zeros.
    """
    weight = torch.cat([weight for weight, _ in parts])
    biases = [bias for _, bias in parts if bias is not None]
    return weight, torch.cat(biases) if biases else weight.new_zeros(len(weight), dtype=torch.float32)


# ------------------------------------------------------------------------------------------------ Llama and others


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
        **rope,  # versions before transformers 5 read these fields here, later versions in rope_parameters
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
        "ffn.router": "block_sparse_moe.gate",
    }
    for number in range(config.experts):
        for name, their_name in zip(("gate", "down", "up"), ("w1", "w2", "w3"), strict=True):
            names[f"ffn.experts.{number}.{name}"] = f"block_sparse_moe.experts.{number}.{their_name}"
    for block in range(config.layers):
        ours, theirs = f"blocks.{block}.", f"model.layers.{block}."
        for name, their_name in names.items():
            weights |= _renamed(state, ours + name, theirs + their_name)
        parts = _queries_keys_values(config, state, f"{ours}attention.")
        for name, pair in zip("qkv", parts, strict=True):
            weight, bias = (halves(config, rows) if name != "v" else rows for rows in pair)
            assert weight is not None
            weights |= _named(f"{theirs}self_attn.{name}_proj", weight, bias)
    return weights


def halves(config: DecoderConfig, rows: Tensor | None) -> Tensor | None:
    """Reorder the rows of W_q or W_k, or the entries of their biases, for the RoPE of transformers.

    In the given order, RoPE rotates the dimensions (2i, 2i + 1) of each head together; in the returned order, it
    rotates the dimensions (i, i + n/2), where n is the number of rotated dimensions. None (no bias) gives None.
    """
    if rows is None:
        return None
    rotated = int(config.head_dim * config.rope_fraction)
    order = torch.arange(config.head_dim)
    order[:rotated] = order[:rotated].view(-1, 2).T.flatten()
    return rows.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)


def _renamed(state: Mapping[str, Tensor], ours: str, theirs: str) -> Weights:
    """Return a layer's weight and, if there is one, its bias, by transformers' name of the layer.

    ours, theirs: the layer's name in `state` and in transformers.
    """
    return {f"{theirs}.{part}": state[key] for part in ("weight", "bias") if (key := f"{ours}.{part}") in state}


# ------------------------------------------------------------------------------------------------ all models


def _queries_keys_values(
    config: DecoderConfig, state: Mapping[str, Tensor], prefix: str
) -> list[tuple[Tensor, Tensor | None]]:
    """Return (weight, bias) of q, of k and of v in one block; a fused W_qkv is split. prefix: `blocks.N.attention.`."""
    if not config.fused_qkv:
        return [(state[f"{prefix}{name}.weight"], state.get(f"{prefix}{name}.bias")) for name in "qkv"]
    sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
    bias = state.get(f"{prefix}qkv.bias")
    biases = [None] * 3 if bias is None else bias.split(sizes)
    return list(zip(state[f"{prefix}qkv.weight"].split(sizes), biases, strict=True))


def _named(name: str, weight: Tensor, bias: Tensor | None) -> Weights:
    return {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})


def _like_llama(
    architecture: str,
    kind: str,
    ours: tuple[str, str],
    act: str,
    eps: str,
    whole_heads: bool = True,
    experts: bool = False,
) -> Family:
    """Return the Family of a class of transformers whose config.json has Llama's fields, except the norm's ε.

    architecture: the name of the class. kind: its `model_type`. ours: the activation and the norm in DecoderConfig.
    act: the activation in config.json. eps: the field of config.json with the norm's ε. whole_heads: whether RoPE must
    rotate all dimensions of each head. experts: as in Family.
    """

    def config(decoder: DecoderConfig) -> dict[str, Any]:
        content = _rope_config(kind, act, eps, decoder)
        if experts:
            content |= {"num_local_experts": decoder.experts, "num_experts_per_tok": decoder.active_experts}
            content |= {"router_aux_loss_coef": decoder.balance}
        return content

    return Family(architecture, *ours, "rope", whole_heads, config, _rope_weights, experts=experts)


FAMILIES: Final = (
    Family("GPT2LMHeadModel", "gelu", "layernorm", "learned", False, _gpt2_config, _gpt2_weights),
    _like_llama("LlamaForCausalLM", "llama", ("swiglu", "rmsnorm"), "silu", "rms_norm_eps"),
    _like_llama("MixtralForCausalLM", "mixtral", ("swiglu", "rmsnorm"), "silu", "rms_norm_eps", experts=True),
    _like_llama("NemotronForCausalLM", "nemotron", ("relu2", "layernorm1p"), "relu2", "norm_eps", whole_heads=False),
    _like_llama("ArceeForCausalLM", "arcee", ("relu2", "rmsnorm"), "relu2", "rms_norm_eps"),
)
