"""Read and write GGUF files: the metadata are those of a DecoderConfig, the tensors are the decoder's parameters.

The package `gguf` of llama.cpp reads the file through a memory map, and decodes packed tensors.

In files of Llama and Arcee, the rows of W_q and W_k are in the order of `Decoder`, whose RoPE rotates neighbours
(2i, 2i + 1). In files of Nemotron they are in the order for rotating (i, i + n/2), where n is the number of rotated
dimensions, and are reordered. In files of Nemotron, a norm's weight is the factor itself, whereas LayerNorm1p
multiplies by 1 + weight, so 1 is subtracted from the stored weights.

A weight NAME.weight of the type NVFP4 can have a scale of the whole tensor, by which llama.cpp multiplies the product:
the tensor NAME.scale. The loaded weight is multiplied by it. NAME.input_scale belongs to the layer's input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fewbits.common.process import extras
from fewbits.kernels.packed import Packed
from fewbits.kernels.packing import unpack
from fewbits.models.importing.families import FAMILIES, Family, family_of, with_gpt2s_layers
from fewbits.models.importing.layouts import Fields, Layout, Published, store_state
from fewbits.models.importing.packed_tensors import by_row
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
class GgufFile:
    """An opened GGUF file, whose tensors are decoded when `read` is called."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]  # ReaderTensor of the package `gguf`, by name

    @staticmethod
    def open(path: Path) -> GgufFile:
        """Open a file; raise ValueError if it is not GGUF, or is truncated or damaged."""
        with extras():
            from gguf.gguf_reader import GGUFReader

        class Reader(GGUFReader):
            """A reader that fails at the end of the file, where the package's own returns fewer numbers."""

            def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **orders: Any) -> Any:
                numbers = super()._get(offset, dtype, count, *order, **orders)
                if len(numbers) < count:
                    raise ValueError("its header describes more than its bytes")
                return numbers

        try:
            with np.errstate(over="ignore"):  # an offset that overflows fails the check below
                reader = Reader(path)
            metadata = {key: field.contents() for key, field in reader.fields.items()}
            if reader.byte_order == "S" or any(tensor.data_offset < reader.data_offset for tensor in reader.tensors):
                raise ValueError("the order of bytes is reversed, or a tensor lies inside the header")
        except (ValueError, LookupError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a GGUF file, or truncated or damaged ({error}): copy or download the file again"
            ) from None
        return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})

    @property
    def origin(self) -> str:
        return str(self.path)

    @property
    def names(self) -> Collection[str]:
        return [name for name in self.tensors if not name.endswith((".scale", ".input_scale"))]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape.tolist())[::-1]  # a file lists columns first

    def read(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(f"{self.path}: tensor {name} has the unsupported type {tensor.tensor_type.name}") from None
        scale = self.tensors.get(f"{name.removesuffix('.weight')}.scale")
        if scale is not None:
            if scale.data.size != 1:
                raise ValueError(f"{self.path}: tensor {scale.name} has {scale.data.size} values; one is expected")
            values = values * np.float32(scale.data.reshape(-1)[0])
        return torch.from_numpy(np.require(values, np.float32, ("C", "W")))


def read_gguf(path: Path, name: str) -> Published:
    """Return the model in a GGUF file, without reading its tensors yet. name: the name to give the model."""
    file = GgufFile.open(path)
    kind = file.metadata.get(ARCHITECTURE)
    if not isinstance(kind, str) or kind not in _LAYOUTS:
        raise ValueError(f"{path}: {ARCHITECTURE} {kind!r} is not supported; supported are {', '.join(_LAYOUTS)}")
    family = next(family for family in FAMILIES if family.kind == kind)
    try:
        config = _config(name, file, family)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    beside = path.with_name("tokenizer.json")
    tokenizer = path if TOKENS in file.metadata else beside if beside.is_file() else None
    note = "GPT-2 in GGUF uses the tanh approximation of GELU; fewbits uses the exact GELU, as nanoGPT does"
    return Published(config, _LAYOUTS[kind], file, (path,), tokenizer, (note,) if kind == "gpt2" else ())


def _config(name: str, file: GgufFile, family: Family) -> DecoderConfig:
    """Return a file's metadata as a DecoderConfig."""
    prefix = f"{family.kind}."
    fields = Fields(
        str(file.path),
        {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)},
    )
    fields.expect("rope.scaling.type", "none", "none", because="fewbits does not scale rotations")
    fields.expect("expert_count", 0, 0, because="fewbits has no experts")
    if _EMBEDDING not in file.tensors:
        raise ValueError(f"{file.path} has no tensor {_EMBEDDING}: the complete file of a language model is expected")
    width, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    head_dim = fields.whole("attention.key_length", width // max(heads, 1))
    fields.expect("attention.value_length", head_dim, head_dim, because="in fewbits values are as long as keys")
    rope: dict[str, Any] = {}
    if family.positions != "learned":
        rotated = fields.whole("rope.dimension_count", head_dim)
        rope = {
            "rope_fraction": rotated / max(head_dim, 1),
            "rope_theta": _shortest(fields.number("rope.freq_base", 10000.0)),
        }
    eps = "layer_norm_rms_epsilon" if family.norm == "rmsnorm" else "layer_norm_epsilon"
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
        tied=_HEAD not in file.tensors,
        bias="blk.0.attn_output.bias" in file.tensors,
        **rope,
        **family.ours,
    )


def _shortest(value: float) -> float:
    """Return the shortest decimal number that rounds to the same FP32 number: 1e-5 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def write_gguf(path: Path, config: DecoderConfig, state: Mapping[str, Tensor], packed: Mapping[str, Packed]) -> None:
    """Write a decoder to a new GGUF file, without a tokenizer: other weights than the packed ones in FP32.

    packed: weights in NVFP4, whose tensor scale becomes NAME.scale, or MXFP4, by their names in `state`. Raise
    ValueError if GGUF has no architecture for the decoder, or no type for a packed weight.
    """
    with extras():
        from gguf import GGMLQuantizationType, GGUFWriter

    kind = family_of(config).kind
    if kind not in _LAYOUTS:
        raise ValueError(f"model {config.name} cannot be exported: GGUF's {kind} is not supported")
    layout, writer = _LAYOUTS[kind], GGUFWriter(path, kind)
    for key, value in _metadata(config, kind).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    writer.add_tokenizer_model("no_vocab")
    blocks = {name: _blocks(name, weight) for name, weight in packed.items()}
    tensors = {name: blocks[name][0] if name in blocks else value.float() for name, value in state.items()}
    if kind == "gpt2":  # whose layers all have biases in llama.cpp
        tensors = with_gpt2s_layers(config, tensors)
    types = {source: type_ for name, (_, type_) in blocks.items() for source in layout.sources(name)}
    scales = {source: packed[name].group_scales for name in packed for source in layout.sources(name)}
    for source, rows in store_state(config, layout, tensors).items():
        raw = GGMLQuantizationType[types[source]] if source in types else None
        writer.add_tensor(source, rows.cpu().numpy(), raw_dtype=raw)
        if (scale := scales.get(source)) is not None:
            writer.add_tensor(source.removesuffix("weight") + "scale", scale.cpu().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(config: DecoderConfig, kind: str) -> dict[str, Any]:
    eps = "layer_norm_rms_epsilon" if config.norm == "rmsnorm" else "layer_norm_epsilon"
    rope = {"rope.freq_base": float(config.rope_theta)}
    rope["rope.dimension_count"] = int(config.head_dim * config.rope_fraction)
    values = {
        "vocab_size": config.vocab,
        "embedding_length": config.width,
        "block_count": config.layers,
        "context_length": config.context,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.{eps}": float(config.norm_eps),
        **({} if config.positions == "learned" else rope),
    }
    return {f"{kind}.{key}": value for key, value in values.items()}


def _blocks(name: str, weight: Packed) -> tuple[Tensor, str]:
    """Return the bytes of a packed weight, with its rows, and the name of GGUF's type.

    A block has its scales and then its codes. The low nibbles of the codes are the first half of the 16 (NVFP4) or 32
    (MXFP4) elements that share a scale, the high nibbles the second half.
    """
    (rows, cols), q = weight.shape, weight.quantizer
    facts = (str(q.format), q.block.cols, str(q.traits.stored))
    types = {("e2m1", 16, "e4m3"): ("NVFP4", 4), ("e2m1", 32, "e8m0"): ("MXFP4", 1)}
    if facts not in types or cols % (size := types[facts][1] * facts[1]):
        raise ValueError(
            f"{name} is quantized by {q} with {cols} elements in a row; GGUF stores e2m1:1x16:nvfp4 in multiples of 64 "
            "elements and e2m1:1x32:mx in multiples of 32"
        )
    type_, several = types[facts]
    codes = unpack(weight.codes.cpu(), 4, cols).view(rows, -1, several, 2, size // several // 2).to(torch.uint8)
    nibbles = (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(2)
    return torch.cat([by_row(weight).view(rows, -1, several), nibbles], 2).flatten(1), type_


_GPT2_NAMES = {"positions": "position_embd", "attention.qkv": "blk.{}.attn_qkv"}
_LAYOUTS: Final = {
    "llama": Layout(_NAMES),
    "arcee": Layout(_NAMES),
    "nemotron": Layout(_NAMES, halves=True, norm_offset=1.0),
    "gpt2": Layout(_NAMES | _GPT2_NAMES),
}
