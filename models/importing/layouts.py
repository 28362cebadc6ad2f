"""Load the tensors of a published file into a decoder's state_dict, by a table of names: the file's layout.

The model decides what is read. Each of its parameters is read from the file, reordered to our conventions and checked
for its shape and for values that are not finite. A tensor of the file that no parameter needs is an error, because the
published model would compute something else without it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.registry import on_meta

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


class Tensors(Protocol):
    """The named tensors of a file or of several files."""

    @property
    def origin(self) -> str:
        """The path that messages name."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, as torch writes it: rows of a matrix first."""

    def read(self, name: str) -> Tensor:
        """Return a tensor in FP32."""


@dataclass(frozen=True)
class Layout:
    """The names of a file's layers by the names of ours, where `{}` is the number of the block, and its conventions.

    halves: the rows of W_q and W_k are in the order for rotating (i, i + n/2) instead of neighbours.
    transposed: the matrices of the blocks' linear layers are [in, out].
    norm_offset: the file's weights of norms, less ours.
    ignored: patterns of names of tensors that hold no parameter.
    """

    layers: Mapping[str, str]
    halves: bool = False
    transposed: bool = False
    norm_offset: float = 0.0
    ignored: tuple[str, ...] = ()

    def sources(self, name: str) -> list[str]:
        """Return the tensors of the file that hold one of our parameters: one, or q, k and v."""
        layer, _, field = name.rpartition(".")
        block, kind = "", layer
        if match := _BLOCK.fullmatch(layer):
            block, kind = match.groups()
        kinds = [kind]
        if kind == "attention.qkv" and kind not in self.layers:
            kinds = ["attention.q", "attention.k", "attention.v"]
        return [f"{self.layers[part].format(block)}.{field}" for part in kinds]


def load_state(config: DecoderConfig, layout: Layout, tensors: Tensors) -> dict[str, Tensor]:
    """Return the state_dict of the decoder, in FP32. Raise ValueError, which names the tensor, if one does not fit."""
    needed = {name: layout.sources(name) for name, _ in _parameters(config)}
    _check_names(config, layout, tensors, {source for sources in needed.values() for source in sources})
    state = {}
    for name, shape in _parameters(config):
        parts = [
            _read(config, layout, tensors, name, source, rows)
            for source, rows in zip(needed[name], _shapes(config, name, shape, len(needed[name])), strict=True)
        ]
        state[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    if config.tied:
        state["head.weight"] = state["embed.weight"]
    return state


def neighbours(config: DecoderConfig, rows: Tensor) -> Tensor:
    """Reorder the rows of W_q, W_k or their biases from rotating halves (i, i + n/2) to neighbours (2i, 2i + 1)."""
    rotated = int(config.head_dim * config.rope_fraction)
    order = torch.arange(config.head_dim)
    order[:rotated] = order[:rotated].view(2, -1).T.flatten()
    return rows.unflatten(0, (-1, config.head_dim))[:, order].flatten(0, 1)


def _parameters(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each parameter; a tied head has none of its own."""
    for name, value in on_meta(config).state_dict().items():
        if not (config.tied and name == "head.weight"):
            yield name, tuple(value.shape)


def _shapes(config: DecoderConfig, name: str, shape: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [shape]
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return [(rows, *shape[1:]) for rows in (queries, keys, keys)]


def _check_names(config: DecoderConfig, layout: Layout, tensors: Tensors, needed: set[str]) -> None:
    there = set(tensors.names)
    if missing := sorted(needed - there):
        raise ValueError(f"{tensors.origin} has no tensor {_some(missing)}, which model {config.name} needs")
    extra = [
        name for name in sorted(there - needed) if not any(re.fullmatch(pattern, name) for pattern in layout.ignored)
    ]
    if extra:
        raise ValueError(
            f"{tensors.origin} has the tensor {_some(extra)}, which no layer of model {config.name} uses, so its "
            "logits would differ"
        )


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read(
    config: DecoderConfig, layout: Layout, tensors: Tensors, name: str, source: str, shape: tuple[int, ...]
) -> Tensor:
    """Return one tensor of the file in our conventions."""
    turned = layout.transposed and len(shape) == 2 and name.startswith("blocks.")
    expected = shape[::-1] if turned else shape
    if (actual := tensors.shape(source)) != expected:
        raise ValueError(
            f"{tensors.origin}: tensor {source} has the shape {_by(actual)}, but {_by(expected)} fits its configuration"
        )
    value = tensors.read(source)
    if not value.isfinite().all():
        raise ValueError(f"{tensors.origin}: tensor {source} has values that are infinite or NaN")
    if turned:
        value = value.mT
    if layout.norm_offset and name.endswith("norm.weight"):
        value = value - layout.norm_offset
    kind = source.rpartition(".")[0]
    if layout.halves and ".attention." in name and _is_query_or_key(layout, kind):
        value = neighbours(config, value)
    return value.contiguous()


def _is_query_or_key(layout: Layout, source: str) -> bool:
    patterns = (re.escape(layout.layers[part]).replace(r"\{\}", r"\d+") for part in ("attention.q", "attention.k"))
    return any(re.fullmatch(pattern, source) for pattern in patterns)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
