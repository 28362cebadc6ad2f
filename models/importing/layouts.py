"""Convert between the tensors of a published file and a decoder's state_dict, by a `Layout`: names and conventions.

On import, each parameter of the decoder is read from the file, checked (shape, finite values) and converted to the
conventions of `Decoder`. A tensor of the file that no parameter needs is an error, because the published model uses it
and would compute something else without it. `Fields` reads the file's configuration.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.registry import on_meta

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)(\..+)")
REQUIRED = object()


class Tensors(Protocol):
    """The interface of a file, or of several files, with named tensors."""

    @property
    def origin(self) -> str:
        """The path of the file or folder, for messages."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, as torch writes it: rows of a matrix first."""

    def read(self, name: str) -> Tensor:
        """Return a tensor in FP32."""


@dataclass(frozen=True)
class Layout:
    """The names of a file's layers, and how its tensors differ from the conventions of `Decoder`.

    layers: layer in `Decoder` → the same layer in the file. For a layer of a block, the former is its name inside the
        block, and `{}` in the latter is the number of the block; that of an expert is absent in the former, and a
        second `{}` in the latter.
    halves: the rows of W_q and W_k are in the order for a RoPE that rotates the dimensions (i, i + n/2) of a head
        together, instead of the neighbours (2i, 2i + 1); n is the number of rotated dimensions.
    transposed: the matrices of the blocks' linear layers are [in, out] instead of [out, in].
    norm_offset: a norm's weight in the file minus its weight in `Decoder`.
    ignored: regular expressions for names of tensors that are not parameters.
    """

    layers: Mapping[str, str]
    halves: bool = False
    transposed: bool = False
    norm_offset: float = 0.0
    ignored: tuple[str, ...] = ()

    def sources(self, name: str) -> list[str]:
        """Return the names of the file's tensors that together are one parameter of `Decoder`.

        This is one tensor, or three for a fused W_qkv whose q, k and v are separate in the file.
        name: the parameter's name in `Decoder`.
        """
        layer, _, field = name.rpartition(".")
        numbers, kind = [""], layer
        if match := _BLOCK.fullmatch(layer):
            numbers[0], kind = match.groups()
        if match := _EXPERT.fullmatch(kind):
            numbers.append(match[2])
            kind = match[1] + match[3]
        kinds = [kind]
        if kind == "attention.qkv" and kind not in self.layers:
            kinds = ["attention.q", "attention.k", "attention.v"]
        return [f"{self.layers[part].format(*numbers)}.{field}" for part in kinds]


def load_state(config: DecoderConfig, layout: Layout, tensors: Tensors) -> dict[str, Tensor]:
    """Return the state_dict of the decoder, in FP32.

    Raise ValueError with the tensor's name if a tensor is missing, is not used, or has a wrong shape or values.
    """
    needed = {name: layout.sources(name) for name, _ in _parameters(config)}
    _check_names(config, layout, tensors, {source for sources in needed.values() for source in sources})
    state = {}
    for name, shape in _parameters(config):
        parts = [
            _read(config, layout, tensors, name, source, rows)
            for source, rows in zip(needed[name], _shapes(config, shape, len(needed[name])), strict=True)
        ]
        state[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    if config.tied:
        state["head.weight"] = state["embed.weight"]
    return state


def store_state(config: DecoderConfig, layout: Layout, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a decoder's state_dict, without learned bit widths, as a file has it: the inverse of `load_state`."""
    tensors = {}
    for name, value in state.items():
        if name.endswith(".bit_scale") or (config.tied and name == "head.weight"):
            continue
        sources = layout.sources(name)
        sizes = [rows for rows, *_ in _shapes(config, value.shape, len(sources))]
        for source, rows in zip(sources, value.split(sizes), strict=True):
            if layout.halves and _is_query_or_key(layout, source):
                rows = _reorder(config, rows, halves=True)
            if layout.norm_offset and name.endswith("norm.weight"):
                rows = rows + layout.norm_offset
            if layout.transposed and name.startswith("blocks.") and rows.ndim == 2:
                rows = rows.mT
            tensors[source] = rows.contiguous()
    return tensors


def _reorder(config: DecoderConfig, rows: Tensor, *, halves: bool) -> Tensor:
    """Reorder the rows of W_q or W_k, or the entries of their biases, for another RoPE.

    In `Decoder`, RoPE rotates the dimensions (2i, 2i + 1) of each head together; with `Layout.halves`, it rotates the
    dimensions (i, i + n/2), where n is the number of rotated dimensions. halves: to that order, instead of from it.
    """
    rotated = int(config.head_dim * config.rope_fraction)
    order = torch.arange(config.head_dim)
    order[:rotated] = order[:rotated].view((-1, 2) if halves else (2, -1)).T.flatten()
    return rows.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)


def _parameters(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each parameter of the decoder, except the weight of a tied head."""
    for name, value in on_meta(config).state_dict().items():
        if not (config.tied and name == "head.weight"):
            yield name, tuple(value.shape)


def _shapes(config: DecoderConfig, shape: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Return the shapes that the file's tensors of one parameter have after conversion to `Decoder`'s conventions.

    shape: the parameter's own. parts: the number of the tensors: 1, or 3 if the parameter is a fused W_qkv (or
    its bias) whose q, k and v are separate in the file.
    """
    if parts == 1:
        return [shape]
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return [(rows, *shape[1:]) for rows in (queries, keys, keys)]


def _check_names(config: DecoderConfig, layout: Layout, tensors: Tensors, needed: set[str]) -> None:
    """Raise ValueError if the file lacks one of the needed tensors, or has one that is neither needed nor ignored."""
    there = set(tensors.names)
    if missing := sorted(needed - there):
        raise ValueError(f"{tensors.origin} has no tensor {_some(missing)}, which model {config.name} needs")
    extra = [
        name for name in sorted(there - needed) if not any(re.fullmatch(pattern, name) for pattern in layout.ignored)
    ]
    if extra:
        raise ValueError(
            f"{tensors.origin} has the tensor {_some(extra)}, which no layer of model {config.name} in fewbits uses: "
            "the model cannot be imported, because its logits would differ from those of the published one"
        )


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read(
    config: DecoderConfig, layout: Layout, tensors: Tensors, name: str, source: str, shape: tuple[int, ...]
) -> Tensor:
    """Read one tensor of the file, and return it converted to the conventions of `Decoder`.

    Raise ValueError if the tensor has a wrong shape or a value that is infinite or NaN.
    name: the name of the parameter that the tensor is, or is a part of. source: the tensor's name in the file.
    shape: the shape of the converted tensor.
    """
    turned = layout.transposed and len(shape) == 2 and name.startswith("blocks.")
    expected = shape[::-1] if turned else shape
    if (actual := tensors.shape(source)) != expected:
        raise ValueError(
            f"{tensors.origin}: tensor {source} has the shape {_by(actual)}, but the model's configuration needs "
            f"{_by(expected)}"
        )
    value = tensors.read(source)
    if not value.isfinite().all():
        raise ValueError(f"{tensors.origin}: tensor {source} has values that are infinite or NaN")
    if turned:
        value = value.mT
    if layout.norm_offset and name.endswith("norm.weight"):
        value = value - layout.norm_offset
    if layout.halves and _is_query_or_key(layout, source):
        value = _reorder(config, value, halves=False)
    return value.contiguous()


def _is_query_or_key(layout: Layout, source: str) -> bool:
    parts = (layout.layers[part].replace("{}", r"\d+") for part in ("attention.q", "attention.k"))
    return any(re.fullmatch(rf"{part}\.\w+", source) for part in parts)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@dataclass(frozen=True)
class Published:
    """A published model that has been opened: its configuration as a DecoderConfig, and the files with its weights.

    files: the files that were read, such as config.json and the weights.
    tokenizer: the file that contains the tokenizer, a tokenizer.json or a GGUF file; None if there is none.
    notes: sentences for the user on how the loaded model differs from the published one.
    """

    config: DecoderConfig
    layout: Layout
    tensors: Tensors
    files: tuple[Path, ...]
    tokenizer: Path | None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        c, count = self.config, len(self.tensors.names)
        largest = max(c.vocab, c.width, c.ffn, c.context, c.heads * c.head_dim, c.kv_heads * c.head_dim)
        if largest >= 1 << 30 or c.layers * max(1, c.experts) > count:  # before a model of these sizes is built
            what = f"{c.layers} layers with sizes up to {largest}"
            raise ValueError(f"{self.tensors.origin}: the configuration has {what}, but there are {count} tensors")

    def state(self) -> dict[str, Tensor]:
        """Read the weights and return them as a state_dict of the decoder, in FP32."""
        return load_state(self.config, self.layout, self.tensors)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file of the model, including the tokenizer's, by file name without folder."""
        files = [*self.files, *([self.tokenizer] if self.tokenizer else [])]
        return {path.name: _sha256(path) for path in dict.fromkeys(files)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Fields:
    """The fields of a published configuration by name, and the file that they come from (`origin`).

    Each method returns the value of one field. For a field that is absent or None it returns the default; without a
    default it raises ValueError. A value of the wrong type raises ValueError, too.
    """

    origin: str
    values: Mapping[str, Any]

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ValueError(f"{self.origin} has no field {name}, which is required")
        return default

    def whole(self, name: str, default: Any = REQUIRED) -> int:
        value = self.get(name, default)
        if type(value) is not int:
            raise ValueError(f"{self.origin}: {name} {value!r}: a whole number is expected")
        return value

    def number(self, name: str, default: Any = REQUIRED) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise ValueError(f"{self.origin}: {name} {value!r}: a number is expected")
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise ValueError(f"{self.origin}: {name} {value!r}: true or false is expected")
        return value

    def expect(self, name: str, default: Any, *valid: Any, because: str = "fewbits supports no other value") -> Any:
        """Return the field's value; raise ValueError if it is not one of `valid`.

        because: why no other value is valid, for the error message; a clause such as "fewbits has no experts".
        """
        value = self.get(name, default)
        if value not in valid:
            choices = " or ".join(repr(choice) for choice in valid)
            raise ValueError(
                f"{self.origin}: a model with {name} {value!r} cannot be imported: {choices} is expected, because "
                f"{because}"
            )
        return value
