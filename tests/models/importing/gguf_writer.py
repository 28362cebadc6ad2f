"""Write small GGUF files for tests, byte by byte, following the format's specification."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbits.models.networks.decoder import DecoderConfig

U32, F32, STRING, ARRAY, BOOL = 4, 6, 8, 9, 7
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
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    body = b""
    for name, (kind, shape, packed) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, len(body))
        body += packed + bytes(-len(packed) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def llama_metadata(config: DecoderConfig) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
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


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    kind, packed = _packed(value)
    return struct.pack("<I", kind) + packed


def _packed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return U32, struct.pack("<I", value)
    if isinstance(value, float):
        return F32, struct.pack("<f", value)
    if isinstance(value, str):
        return STRING, _string(value)
    items = [_packed(item) for item in value]
    return ARRAY, struct.pack("<IQ", items[0][0], len(items)) + b"".join(packed for _, packed in items)
