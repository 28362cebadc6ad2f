"""Read a published model from a Hugging Face folder: config.json and safetensors; also return tokenizer.json's path.

`families.py` lists the supported classes. A setting of config.json that `Decoder` cannot represent is an error.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fewbits.models.importing.families import FAMILIES, Family
from fewbits.models.importing.layouts import Fields, Published, Tensors
from fewbits.models.importing.packed_tensors import QUANTIZATION, packed_folder
from fewbits.models.importing.safetensors_files import DTYPES, PACKED, SafetensorsFolder, json_object
from fewbits.models.networks.decoder import DecoderConfig

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")


def read_folder(folder: Path, name: str) -> Published:
    """Return the model in a Hugging Face folder, without reading its tensors yet. name: the name to give the model."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} has no {CONFIG}: a Hugging Face folder or a GGUF file is expected")
    fields = Fields(str(path), json_object(path))
    kind = fields.get("model_type")
    family = next((family for family in FAMILIES if family.kind == kind), None)
    if family is None:
        kinds = ", ".join(family.kind for family in FAMILIES)
        raise ValueError(f"{path}: model_type {kind!r} is not supported; supported are {kinds}")
    notes = []
    try:
        config = (_gpt2 if kind == "gpt2" else _like_llama)(name, fields, family)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    if kind == "gpt2" and (activation := fields.get("activation_function", "gelu_new")) in TANH_GELU:
        notes.append(
            f"its activation {activation} approximates GELU by tanh; fewbits uses the exact GELU, as nanoGPT does"
        )
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


def _gpt2(name: str, fields: Fields, family: Family) -> DecoderConfig:
    fields.expect("activation_function", "gelu_new", "gelu", *TANH_GELU)
    for setting, only in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        fields.expect(setting, only, only)
    width, heads = fields.whole("n_embd", 768), fields.whole("n_head", 12)
    if heads < 1 or width % heads:
        raise ValueError(f"{fields.origin}: n_embd {width} must be a multiple of n_head {heads}")
    return DecoderConfig(
        name=name,
        vocab=fields.whole("vocab_size"),
        width=width,
        layers=fields.whole("n_layer", 12),
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn=fields.whole("n_inner", 4 * width),
        norm_eps=fields.number(family.eps, family.default_eps),
        context=fields.whole("n_positions", 1024),
        tied=fields.flag("tie_word_embeddings", True),
        bias=True,
        init_std=fields.number("initializer_range", 0.02),
        **family.ours,
    )


def _like_llama(name: str, fields: Fields, family: Family) -> DecoderConfig:
    """Read a config.json with Llama's field names."""
    fields.expect("hidden_act", family.their_activation, family.their_activation)
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    bias = fields.flag("attention_bias", False)
    fields.expect("mlp_bias", False, bias, because="in fewbits all linear layers of blocks have a bias or none has")
    theta = 10000.0
    experts: dict[str, Any] = {}
    if family.experts:
        fields.expect("sliding_window", None, None)
        theta = 1e6  # Mixtral's default
        experts = {
            "experts": fields.whole("num_local_experts", 8),
            "active_experts": fields.whole("num_experts_per_tok", 2),
            "balance": fields.number("router_aux_loss_coef", 0.001),
        }
    return DecoderConfig(
        name=name,
        vocab=fields.whole("vocab_size"),
        width=width,
        layers=fields.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=fields.whole("head_dim", width // max(heads, 1)),
        ffn=fields.whole("intermediate_size"),
        norm_eps=fields.number(family.eps, family.default_eps),
        **_rope(fields, 1.0 if family.whole_heads else 0.5, theta),
        context=fields.whole("max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings", False),
        bias=bias,
        init_std=fields.number("initializer_range", 0.02),
        **family.ours,
        **experts,
    )


def _rope(fields: Fields, fraction: float, theta: float) -> dict[str, Any]:
    """Return `rope_theta` and `rope_fraction` of DecoderConfig; raise ValueError if config.json scales RoPE.

    fraction: the value of `partial_rotary_factor` if config.json has none. 1 means that models of this kind rotate
        whole heads; then config.json must not have another value. theta: the default of `rope_theta`.
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
    return {"rope_theta": both.number("rope_theta", theta), "rope_fraction": rotated}
