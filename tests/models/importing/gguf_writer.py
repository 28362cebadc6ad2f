"""Write small GGUF files for tests with llama.cpp's own writer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quant_shape_to_byte_shape
from torch import Tensor

from fewbits.models.networks.decoder import DecoderConfig

ARCHITECTURE = "general.architecture"
NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.out": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "ffn_gate",
    "ffn.up": "ffn_up",
    "ffn.down": "ffn_down",
}


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, Sequence[int], bytes]], version: int = 3
) -> Path:
    """Write a GGUF file and return its path.

    tensors: for each tensor, GGUF's number of its type, its shape in torch's order, and its bytes.
    """
    writer = GGUFWriter(path, metadata.get(ARCHITECTURE, "none"))
    for key, value in metadata.items():
        if key != ARCHITECTURE:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    for name, (kind, shape, packed) in tensors.items():
        of = GGMLQuantizationType(kind)
        data = np.frombuffer(packed, np.uint8).reshape(quant_shape_to_byte_shape(shape, of))
        writer.add_tensor(name, data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    path.write_bytes(content[:4] + version.to_bytes(4, "little") + content[8:])
    return path


def llama_metadata(config: DecoderConfig) -> dict[str, Any]:
    return {
        ARCHITECTURE: "llama",
        "llama.block_count": config.layers,
        "llama.context_length": config.context,
        "llama.embedding_length": config.width,
        "llama.feed_forward_length": config.ffn,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
    }


def llama_tensors(config: DecoderConfig, state: Mapping[str, Tensor]) -> dict[str, tuple[int, Sequence[int], bytes]]:
    """Return a decoder's FP32 weights by GGUF's names, for `write_gguf`; rows of W_q and W_k are not reordered."""
    tensors: dict[str, tuple[int, Sequence[int], bytes]] = {}
    for name, value in state.items():
        if not (config.tied and name == "head.weight"):
            layer, _, field = name.rpartition(".")
            prefix = ""
            if layer.startswith("blocks."):
                _, number, layer = layer.split(".", 2)
                prefix = f"blk.{number}."
            tensors[f"{prefix}{NAMES[layer]}.{field}"] = (0, tuple(value.shape), as_bytes(value))
    return tensors


def as_bytes(value: Tensor) -> bytes:
    return value.detach().contiguous().view(torch.uint8).numpy().tobytes()
