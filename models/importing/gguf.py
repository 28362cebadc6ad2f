"""Read a published model from a GGUF file: the metadata become a DecoderConfig, the tensors the decoder's parameters.

In files of Llama and Arcee, the rows of W_q and W_k are in the order of `Decoder`, whose RoPE rotates neighbours
(2i, 2i + 1). In files of Nemotron they are in the order for rotating (i, i + n/2), where n is the number of rotated
dimensions, and are reordered. In files of Nemotron, a norm's weight is the factor itself, whereas LayerNorm1p
multiplies by 1 + weight, so 1 is subtracted from the stored weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fewbits.models.importing.fields import Fields
from fewbits.models.importing.gguf_file import GgufFile
from fewbits.models.importing.layouts import Layout
from fewbits.models.importing.published import Published
from fewbits.models.networks.decoder import DecoderConfig

ARCHITECTURE, TOKENS = "general.architecture", "tokenizer.ggml.tokens"
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"

_NAMES = {  # a layer of Decoder: its name in GGUF, where {} is the block's number
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "blk.{}.attn_norm",
    "attention.q": "blk.{}.attn_q",
    "attention.k": "blk.{}.attn_k",
    "attention.v": "blk.{}.attn_v",
    "attention.out": "blk.{}.attn_output",
    "ffn_norm": "blk.{}.ffn_norm",
    "ffn.gate": "blk.{}.ffn_gate",
    "ffn.up": "blk.{}.ffn_up",
    "ffn.down": "blk.{}.ffn_down",
}


@dataclass(frozen=True)
class _Family:
    """An architecture of GGUF, such as `llama`, and how to read it."""

    ours: Mapping[str, Any]  # the fields of DecoderConfig that the architecture fixes
    layout: Layout
    notes: tuple[str, ...] = ()  # how the loaded model differs from the published one


def read_gguf(path: Path, name: str) -> Published:
    """Return the model in a GGUF file, without reading its tensors yet. name: the name to give the model."""
    file = GgufFile.open(path)
    kind = file.metadata.get(ARCHITECTURE)
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(f"{path}: {ARCHITECTURE} {kind!r} is not supported; supported are {', '.join(_FAMILIES)}")
    family = _FAMILIES[kind]
    try:
        config = _config(name, file, kind, family)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    tokenizer = path if TOKENS in file.metadata else None
    return Published(config, family.layout, file, (path,), tokenizer, family.notes)


def _config(name: str, file: GgufFile, kind: str, family: _Family) -> DecoderConfig:
    """Return a file's metadata as a DecoderConfig. kind: the architecture, which is the prefix of metadata keys."""
    prefix = f"{kind}."
    fields = Fields(
        str(file.path),
        {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)},
    )
    fields.expect("rope.scaling.type", "none", "none", because="fewbits does not scale rotations")
    fields.expect("expert_count", 0, 0, because="fewbits has no experts")
    if _EMBEDDING not in file.places:
        raise ValueError(f"{file.path} has no tensor {_EMBEDDING}: the complete file of a language model is expected")
    width, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    head_dim = fields.whole("attention.key_length", width // max(heads, 1))
    fields.expect("attention.value_length", head_dim, head_dim, because="in fewbits values are as long as keys")
    rope: dict[str, Any] = {}
    if family.ours.get("positions") != "learned":
        rotated = fields.whole("rope.dimension_count", head_dim)
        rope = {
            "rope_fraction": rotated / max(head_dim, 1),
            "rope_theta": _shortest(fields.number("rope.freq_base", 10000.0)),
        }
    eps = "layer_norm_rms_epsilon" if family.ours["norm"] == "rmsnorm" else "layer_norm_epsilon"
    return DecoderConfig(
        name=name,
        vocab=file.shape(_EMBEDDING)[0],
        width=width,
        layers=fields.whole("block_count"),
        heads=heads,
        kv_heads=fields.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=fields.whole("feed_forward_length"),
        norm_eps=_shortest(fields.number(f"attention.{eps}", 1e-5)),
        context=fields.whole("context_length"),
        tied=_HEAD not in file.places,
        bias="blk.0.attn_output.bias" in file.places,
        **rope,
        **family.ours,
    )


def _shortest(value: float) -> float:
    """Return the shortest decimal number that rounds to the same FP32 number: 1e-5 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


_GPT2_NAMES = {"positions": "position_embd", "attention.qkv": "blk.{}.attn_qkv"}
_FAMILIES: Final = {
    "llama": _Family(
        {"activation": "swiglu", "norm": "rmsnorm", "fused_qkv": False, "init": "llama"},
        Layout(_NAMES),
    ),
    "arcee": _Family({"activation": "relu2", "norm": "rmsnorm"}, Layout(_NAMES)),
    "nemotron": _Family({"activation": "relu2", "norm": "layernorm1p"}, Layout(_NAMES, halves=True, norm_offset=1.0)),
    "gpt2": _Family(
        {"activation": "gelu", "norm": "layernorm", "positions": "learned"},
        Layout(_NAMES | _GPT2_NAMES),
        ("GPT-2 in GGUF uses the tanh approximation of GELU; fewbits uses the exact GELU, as nanoGPT does",),
    ),
}
