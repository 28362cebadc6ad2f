"""Read a published model from a Hugging Face folder: config.json and safetensors; also return tokenizer.json's path.

This is the inverse of `fewbits.models.networks.huggingface`, whose table lists the supported classes. A setting of
config.json that `Decoder` cannot represent is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fewbits.models.importing.layouts import Fields, Layout, Published, Tensors
from fewbits.models.importing.packed_tensors import QUANTIZATION, packed_folder
from fewbits.models.importing.safetensors_files import DTYPES, PACKED, SafetensorsFolder, json_object
from fewbits.models.networks.decoder import DecoderConfig

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")

_GPT2 = Layout(
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
_LLAMA = Layout(
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
_MIXTRAL = replace(
    _LLAMA,
    layers={
        **{ours: theirs for ours, theirs in _LLAMA.layers.items() if not ours.startswith("ffn.")},
        "ffn.router": f"{_MOE}.gate",
        "ffn.experts.gate": _MOE + ".experts.{}.w1",
        "ffn.experts.down": _MOE + ".experts.{}.w2",
        "ffn.experts.up": _MOE + ".experts.{}.w3",
    },
)


@dataclass(frozen=True)
class _Family:
    """A model_type of config.json, such as `llama`, and how to read it."""

    # Given a name for the model and the fields of config.json, return our configuration, and notes, which are sentences
    # on how the loaded model differs from the published one.
    config: Callable[[str, Fields], tuple[DecoderConfig, list[str]]]
    layout: Layout


def read_folder(folder: Path, name: str) -> Published:
    """Return the model in a Hugging Face folder, without reading its tensors yet. name: the name to give the model."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG}: a Hugging Face folder or a GGUF file is expected")
    fields = Fields(str(path), json_object(path))
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(f"{path}: model_type {kind!r} is not supported; supported are {', '.join(_FAMILIES)}")
    family = _FAMILIES[kind]
    try:
        config, notes = family.config(name, fields)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    layout = family.layout
    files = SafetensorsFolder.open(folder, DTYPES + PACKED if QUANTIZATION in fields.values else DTYPES)
    tensors: Tensors = files
    if QUANTIZATION in fields.values:
        tensors = packed_folder(files, fields, layout.transposed)
        notes.append(f"its weights were decoded from {tensors.storage.dialect.name}; its inputs are not quantized")
    ignored = (*layout.ignored, r"lm_head\.weight") if config.tied else layout.ignored
    layout = replace(layout, ignored=ignored)
    # A model that was saved without its head (GPT2Model, LlamaModel …) has names without these prefixes.
    if not any(item.startswith(("transformer.", "model.")) for item in tensors.names):
        layers = {
            ours: theirs.removeprefix("transformer.").removeprefix("model.") for ours, theirs in layout.layers.items()
        }
        layout = replace(layout, layers=layers)
    tokenizer = folder / TOKENIZER
    return Published(
        config,
        layout,
        tensors,
        files=(path, *files.files),
        tokenizer=tokenizer if tokenizer.is_file() else None,
        notes=tuple(notes),
    )


def _gpt2(name: str, fields: Fields) -> tuple[DecoderConfig, list[str]]:
    activation = fields.expect("activation_function", "gelu_new", "gelu", *TANH_GELU)
    for setting, only in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        fields.expect(setting, only, only)
    width, heads = fields.whole("n_embd", 768), fields.whole("n_head", 12)
    if heads < 1 or width % heads:
        raise ValueError(f"{fields.origin}: n_embd {width} must be a multiple of n_head {heads}")
    config = DecoderConfig(
        name=name,
        vocab=fields.whole("vocab_size"),
        width=width,
        layers=fields.whole("n_layer", 12),
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=fields.whole("n_inner", 4 * width),
        activation="gelu",
        norm="layernorm",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        positions="learned",
        context=fields.whole("n_positions", 1024),
        tied=fields.flag("tie_word_embeddings", True),
        bias=True,
        init_std=fields.number("initializer_range", 0.02),
    )
    note = f"its activation {activation} approximates GELU by tanh; fewbits uses the exact GELU, as nanoGPT does"
    return config, [note] if activation in TANH_GELU else []


def _like_llama(
    ours: tuple[str, str], act: str, eps: tuple[str, float], fraction: float, **others: Any
) -> Callable[[str, Fields], tuple[DecoderConfig, list[str]]]:
    """Return a function for `_Family.config` that reads a config.json with Llama's field names.

    The loaded model never differs from the published one, so the function's second result, the notes, is an empty list.
    ours: the names of the activation and the norm in DecoderConfig. act: the required `hidden_act`. eps: the name and
    the default of the field for the norm's ε. fraction: the default of `partial_rotary_factor`, the fraction of a
    head's dimensions that RoPE rotates; if this default is 1, the field must be 1. others: further fields of
    DecoderConfig.
    """
    activation, norm = ours

    def read(name: str, fields: Fields) -> tuple[DecoderConfig, list[str]]:
        fields.expect("hidden_act", act, act)
        width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
        bias = fields.flag("attention_bias", False)
        fields.expect("mlp_bias", False, bias, because="in fewbits all linear layers of blocks have a bias or none has")
        config = DecoderConfig(
            name=name,
            vocab=fields.whole("vocab_size"),
            width=width,
            layers=fields.whole("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.whole("num_key_value_heads", heads),
            head_dim=fields.whole("head_dim", width // max(heads, 1)),
            ffn=fields.whole("intermediate_size"),
            activation=activation,
            norm=norm,
            norm_eps=fields.number(*eps),
            positions="rope",
            **_rope(fields, fraction),
            context=fields.whole("max_position_embeddings"),
            tied=fields.flag("tie_word_embeddings", False),
            bias=bias,
            init_std=fields.number("initializer_range", 0.02),
            **others,
        )
        return config, []

    return read


def _mixtral(name: str, fields: Fields) -> tuple[DecoderConfig, list[str]]:
    fields = replace(fields, values={"rope_theta": 1e6, **fields.values})  # Mixtral's default
    fields.expect("sliding_window", None, None)
    config, notes = _like_llama(_SWIGLU, "silu", ("rms_norm_eps", 1e-5), 1.0, **_LIKE_OURS)(name, fields)
    config = replace(
        config,
        experts=fields.whole("num_local_experts", 8),
        active_experts=fields.whole("num_experts_per_tok", 2),
        balance=fields.number("router_aux_loss_coef", 0.001),
    )
    return config, notes


def _rope(fields: Fields, fraction: float) -> dict[str, Any]:
    """Return `rope_theta` and `rope_fraction` of DecoderConfig; raise ValueError if config.json scales RoPE.

    fraction: the value of `partial_rotary_factor` if config.json has none. 1 means that models of this kind rotate
        whole heads; then config.json must not have another value.
    """
    nested = fields.get("rope_parameters", fields.get("rope_scaling", {}))
    if not isinstance(nested, dict):
        raise ValueError(f"{fields.origin}: rope_parameters (or rope_scaling) {nested!r}: an object is expected")
    both = Fields(
        fields.origin, {**fields.values, **{key: value for key, value in nested.items() if value is not None}}
    )
    kind = "rope_type" if "rope_type" in nested else "type"
    Fields(fields.origin, nested).expect(kind, "default", "default", because="fewbits does not scale rotations")
    rotated = both.number("partial_rotary_factor", fraction)
    if fraction == 1 and rotated != 1:
        raise ValueError(
            f"{fields.origin}: a model with partial_rotary_factor {rotated} cannot be imported: 1.0 is expected, "
            "because models of this model_type rotate whole heads"
        )
    return {"rope_theta": both.number("rope_theta", 10000.0), "rope_fraction": rotated}


# fused_qkv is set as in the papers' model of each family (`presets.py`): three layers for Llama and Mixtral, else one.
_SWIGLU, _LIKE_OURS = ("swiglu", "rmsnorm"), {"fused_qkv": False, "init": "llama"}
_FAMILIES: Final = {
    "gpt2": _Family(_gpt2, _GPT2),
    "llama": _Family(_like_llama(_SWIGLU, "silu", ("rms_norm_eps", 1e-6), 1.0, **_LIKE_OURS), _LLAMA),
    "mixtral": _Family(_mixtral, _MIXTRAL),
    "nemotron": _Family(_like_llama(("relu2", "layernorm1p"), "relu2", ("norm_eps", 1e-5), 0.5), _LLAMA),
    "arcee": _Family(_like_llama(("relu2", "rmsnorm"), "relu2", ("rms_norm_eps", 1e-5), 1.0), _LLAMA),
}
