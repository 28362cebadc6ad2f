"""List the model classes of the library transformers that a decoder can be, and convert a decoder to one of them.

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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from fewbits.models.importing.layouts import Layout, store_state
from fewbits.models.networks.decoder import DecoderConfig

Weights = dict[str, Tensor]

GPT2 = Layout(
    {
        "embed": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "attention_norm": "transformer.h.{}.ln_1",
        "attention.qkv": "transformer.h.{}.attn.c_attn",
        "attention.out": "transformer.h.{}.attn.c_proj",
        "ffn_norm": "transformer.h.{}.ln_2",
        "ffn.up": "transformer.h.{}.mlp.c_fc",
        "ffn.down": "transformer.h.{}.mlp.c_proj",
    },
    transposed=True,
    ignored=(r".*\.attn\.(masked_)?bias",),  # the causal mask
)
LLAMA = Layout(
    {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "model.layers.{}.input_layernorm",
        "attention.q": "model.layers.{}.self_attn.q_proj",
        "attention.k": "model.layers.{}.self_attn.k_proj",
        "attention.v": "model.layers.{}.self_attn.v_proj",
        "attention.out": "model.layers.{}.self_attn.o_proj",
        "ffn_norm": "model.layers.{}.post_attention_layernorm",
        "ffn.gate": "model.layers.{}.mlp.gate_proj",
        "ffn.up": "model.layers.{}.mlp.up_proj",
        "ffn.down": "model.layers.{}.mlp.down_proj",
    },
    halves=True,
    ignored=(r".*\.rotary_emb\.inv_freq",),
)
_MOE = "model.layers.{}.block_sparse_moe"
MIXTRAL = replace(
    LLAMA,
    layers={
        **{ours: theirs for ours, theirs in LLAMA.layers.items() if not ours.startswith("ffn.")},
        "ffn.router": f"{_MOE}.gate",
        "ffn.experts.gate": _MOE + ".experts.{}.w1",
        "ffn.experts.down": _MOE + ".experts.{}.w2",
        "ffn.experts.up": _MOE + ".experts.{}.w3",
    },
)


@dataclass(frozen=True)
class Family:
    """A model class of transformers, and the decoders that it can represent.

    activation, norm, positions: the values that these fields of DecoderConfig must have. their_activation: the one of
    config.json. eps: the field of config.json with the norm's ε.
    """

    kind: str  # `model_type` of config.json, and the architecture of GGUF
    architecture: str  # the name of the class
    activation: str
    norm: str
    positions: str
    layout: Layout
    their_activation: str
    eps: str
    default_eps: float = 1e-5
    whole_heads: bool = True  # RoPE must rotate all dimensions of each head (`rope_fraction` = 1)
    experts: bool = False  # a mixture of experts takes the feed-forward layer's place

    @property
    def ours(self) -> dict[str, Any]:
        """The fields of DecoderConfig that the class fixes, and those that the papers' model of this family has."""
        papers = {"fused_qkv": False, "init": "llama"} if self.activation == "swiglu" else {}
        return {"activation": self.activation, "norm": self.norm, "positions": self.positions, **papers}

    def fits(self, config: DecoderConfig) -> bool:
        kinds = (config.activation, config.norm, config.positions)
        rotated = not self.whole_heads or config.rope_fraction == 1
        experts = self.experts == bool(config.experts)
        return kinds == (self.activation, self.norm, self.positions) and rotated and experts


FAMILIES: Final = (
    Family(
        "gpt2", "GPT2LMHeadModel", "gelu", "layernorm", "learned", GPT2, "gelu", "layer_norm_epsilon", whole_heads=False
    ),
    Family("llama", "LlamaForCausalLM", "swiglu", "rmsnorm", "rope", LLAMA, "silu", "rms_norm_eps", 1e-6),
    Family("mixtral", "MixtralForCausalLM", "swiglu", "rmsnorm", "rope", MIXTRAL, "silu", "rms_norm_eps", experts=True),
    Family(
        "nemotron", "NemotronForCausalLM", "relu2", "layernorm1p", "rope", LLAMA, "relu2", "norm_eps", whole_heads=False
    ),
    Family("arcee", "ArceeForCausalLM", "relu2", "rmsnorm", "rope", LLAMA, "relu2", "rms_norm_eps"),
)


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
            queries = config.heads * config.head_dim
            if family.kind == "gpt2" and (queries != config.width or config.kv_heads != config.heads):
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
        "model_type": family.kind,
        "architectures": [family.architecture],
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": "float32",
        "torch_dtype": "float32",  # the name of the field `dtype` before transformers 5
        **(_gpt2_config if family.kind == "gpt2" else _rope_config)(config, family),
    }
    if family.kind == "gpt2":
        state = with_gpt2s_layers(config, state)
    weights = store_state(config, family.layout, state)
    return content, {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}


def with_gpt2s_layers(config: DecoderConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict with the layers of GPT-2: W_qkv is fused, and all layers but the head have biases."""
    state = dict(state)
    for block in range(0 if config.fused_qkv else config.layers):
        for field in ("weight", "bias"):
            parts = [f"blocks.{block}.attention.{part}.{field}" for part in "qkv"]
            if parts[0] in state:
                state[f"blocks.{block}.attention.qkv.{field}"] = torch.cat([state.pop(part) for part in parts])
    named = [name for name in state if name.startswith(("blocks.", "norm.")) and name.endswith(".weight")]
    return {name.replace(".weight", ".bias"): torch.zeros(len(state[name])) for name in named} | state


def _gpt2_config(config: DecoderConfig, family: Family) -> dict[str, Any]:
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return dropout | {
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.ffn,
        "activation_function": family.activation,
        family.eps: config.norm_eps,
    }


def _rope_config(config: DecoderConfig, family: Family) -> dict[str, Any]:
    rope = {"rope_theta": config.rope_theta, "partial_rotary_factor": config.rope_fraction}
    content = {
        "hidden_size": config.width,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": family.their_activation,
        "max_position_embeddings": config.context,
        family.eps: config.norm_eps,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        **rope,  # versions before transformers 5 read these fields here, later versions in rope_parameters
        "rope_parameters": {"rope_type": "default", **rope},
    }
    if family.experts:
        content |= {"num_local_experts": config.experts, "num_experts_per_tok": config.active_experts}
        content |= {"router_aux_loss_coef": config.balance}
    return content
