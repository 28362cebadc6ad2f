"""Write packed weights as other projects' checkpoints store them, and read them back.

A weight becomes codes, block scales and, in NVFP4, a scale of the whole tensor. All scales are stored for rows of
blocks: those of square blocks are repeated for each row. `STORAGES` says how each format names the tensors, and the
format's dialect (`kernels/dialects.py`) in which order it multiplies them.

Codes and block scales are those of training. The values are, too, in the compute dtype: formats multiply in another
order than `decode`, so an FP32 result can differ in its last bit, and `nearest_scale` takes the stored tensor scale,
among the neighbours of the exact one, with which all values of a weight round to those of training.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from fewbits.kernels.dialects import DIALECTS, Dialect, TwoLevel
from fewbits.kernels.formats import TABLE
from fewbits.kernels.packed import Packed, encode
from fewbits.kernels.packing import swizzle, unpack
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.elements import values_of
from fewbits.models.importing.families import Weights, to_huggingface
from fewbits.models.importing.layouts import Fields
from fewbits.models.importing.safetensors_files import SafetensorsFolder
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.quantized_linear import QuantizedLinear, StepContext

QUANTIZATION = "quantization_config"  # the field of config.json
_NEIGHBOURS = 64  # candidates for a stored tensor scale, on either side of the exact one
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))  # one product in vLLM
_OF_INPUTS = ("input_global_scale", "input_scale", "k_scale", "v_scale", "q_scale")  # scales of activations


@dataclass(frozen=True)
class Storage:
    """A format's names for the tensors of a packed weight, by the last part of their names, and its configuration."""

    dialect: Dialect
    codes: str
    scales: str
    tensor: str  # empty: there is no scale of the whole tensor
    config: Mapping[str, Any] = field(default_factory=dict)  # content of `quantization_config`, without kept layers
    kept: str = "ignore"  # its field for the names of kept layers

    @property
    def columns(self) -> int:
        """The number of elements of a row that share a block scale."""
        return Quantizer.parse(self.dialect.quantizer).block.cols or 1

    def stores(self, q: Quantizer) -> bool:
        """Tell whether the format has codes and scales like those of q."""
        ours = Quantizer.parse(self.dialect.quantizer)
        same = (q.format, q.traits.stored, q.traits.kind) == (ours.format, ours.traits.stored, ours.traits.kind)
        return same and q.block.cols == self.columns

    def decode(self, codes: Tensor, scales: Tensor, tensor: Tensor | None) -> Tensor:
        """Return the values in FP32. codes, scales: uint8, as stored, with the rows of the weight."""
        ours = Quantizer.parse(self.dialect.quantizer)
        q = values_of(unpack(codes, 4, 2 * codes.shape[1]), ours.format)
        s = values_of(scales, ours.traits.stored or TABLE["e8m0"]).repeat_interleave(self.columns, 1)
        return q * s if tensor is None else self.product(q, s, tensor)

    def product(self, q: Tensor, s: Tensor, tensor: Tensor) -> Tensor:
        """Return elements q times block scales s times the tensor's scale, in the format's order of operations."""
        steps = self.dialect.steps
        assert isinstance(steps, TwoLevel)
        inverse = self.dialect.layout.tensor == "g"
        return {
            "(q*s)*d": lambda: q * s * (1 / tensor if inverse else tensor),
            "q*(s*d)": lambda: q * (s * (1 / tensor if inverse else tensor)),
            "q*(s/g)": lambda: q * (s / (tensor if inverse else 1 / tensor)),
        }[steps.decode]()


def packed_weight(layer: QuantizedLinear, context: StepContext, dtype: torch.dtype) -> Packed | None:
    """Return a layer's weight for fprop in packed storage, as evaluation computes it; None if it is not quantized.

    `decode` restores the values of `quantize_weight_for`. dtype: the compute dtype. Raise ValueError for a mixture or a
    rotation, which no format of other projects can express.
    """
    slot = layer.plans[context.switched].w.first
    if slot.spec is None:
        return None
    if not isinstance(slot.spec, Quantizer) or slot.spec.hadamard:
        why = "has a rotation" if isinstance(slot.spec, Quantizer) else f"is a {type(slot.spec).__name__.lower()}"
        raise ValueError(f"layer {layer.name}: fprop.w {why} ({slot.spec}), which packed formats cannot express")
    seed = layer.seed(context, "fprop.w") if slot.spec.needs_seed else None
    return encode(layer.matrix.detach().to(dtype), slot.spec, axis=slot.axis, seed=seed)


def nearest_scale(storage: Storage, packed: Packed) -> tuple[Tensor, int]:
    """Return the tensor scale to store, and how many pairs of element and block scale it decodes to other values.

    The values are compared in the dtype of the packed tensor, with those of `decode`.
    """
    assert packed.group_scales is not None
    scales = by_row(packed).long().repeat_interleave(storage.columns, 1)
    pairs = (scales * 8 + (unpack(packed.codes, 4, packed.shape[1]) & 7)).unique()
    q, s = values_of(pairs & 7, TABLE["e2m1"]), values_of(pairs >> 3, TABLE["e4m3"])
    d = packed.group_scales.float().cpu()
    exact = 1 / d if storage.dialect.layout.tensor == "g" else d
    steps = torch.arange(2 * _NEIGHBOURS + 1, dtype=torch.int32)
    steps = torch.where(steps % 2 == 0, steps // 2, -(steps + 1) // 2)  # 0, -1, 1, -2, …
    candidates = (exact.view(torch.int32) + steps).view(torch.float32)
    same = storage.product(q, s, candidates[:, None]).to(packed.dtype) == (q * s * d).to(packed.dtype)
    wrong = (~same).sum(1)
    best = int(wrong.argmin())
    return candidates[best], int(wrong[best])


def by_row(packed: Packed) -> Tensor:
    """Return the block scales with a row for each row of the tensor."""
    assert packed.scales is not None
    tall = packed.quantizer.block.resolve(packed.shape)[0]
    return packed.scales.cpu().repeat_interleave(tall, 0)[: packed.shape[0]]


def to_packed(
    config: DecoderConfig,
    state: Mapping[str, Tensor],
    packed: Mapping[str, Packed],
    format_: str,
    end: int | None = None,
) -> tuple[dict[str, Any], Weights, list[str]]:
    """Return the content of config.json, the tensors of the safetensors files, and messages on what differs.

    packed: the packed weights by their names in `state`; in files they are out × in, also those of GPT-2, whose other
    matrices are in × out. format_: one of FORMATS. The other arguments are those of `to_huggingface`.
    """
    if not packed:
        raise ValueError("the recipe quantizes no weight for fprop: export with --format huggingface")
    storage, notes = _storage_for(format_, packed), []
    dtype = str(next(iter(packed.values())).dtype).removeprefix("torch.")
    wrong = 0
    parts: list[dict[str, Tensor]] = [{}, {}, {}]  # codes, scales and, as a column, the tensor's scale
    for name, weight in packed.items():
        parts[0][name], parts[1][name] = weight.codes.cpu(), by_row(weight)
        if storage.tensor:
            scale, differing = nearest_scale(storage, weight)
            parts[2][name] = scale.expand(weight.shape[0], 1)
            wrong += differing > 0
    if wrong:
        notes.append(
            f"{wrong} of {len(packed)} weights: the format multiplies scales in another order, so some values differ "
            f"from training's in the last bit of {dtype}"
        )
    content, codes = to_huggingface(config, {**state, **parts[0]}, end)
    _, scales = to_huggingface(config, {**state, **parts[1]}, end)
    _, columns = to_huggingface(config, {**state, **parts[2]}, end)
    weights: Weights = {}
    kept, tensors = [] if "lm_head.weight" in codes else ["lm_head"], {}
    for name, value in codes.items():
        layer = name.removesuffix(".weight")
        if value.dtype != torch.uint8:
            weights[name] = value
            if value.ndim == 2:
                kept.append(layer)
            continue
        stored = scales[name]
        if content["model_type"] == "gpt2":
            value, stored = value.mT.contiguous(), stored.mT.contiguous()
        weights[f"{layer}.{storage.codes}"] = value
        weights[f"{layer}.{storage.scales}"] = stored.view(torch.float8_e4m3fn) if storage.tensor else stored
        if storage.tensor:
            unique = columns[name].unique()
            if len(unique) > 1:
                raise ValueError(
                    f"{layer} joins layers with separate tensor scales, but has one: train with model.fused_qkv=true"
                )
            weights[f"{layer}.{storage.tensor}"] = tensors[layer] = unique.view(_TENSOR_SHAPE.get(format_, (1,)))
    content[QUANTIZATION] = {**storage.config, storage.kept: kept}
    notes += _unread(format_, content["model_type"], tensors)
    return {**content, "dtype": dtype, "torch_dtype": dtype}, weights, notes


def file_metadata(format_: str, weights: Weights, dtype: str) -> dict[str, str]:
    """Return what each safetensors file says of all weights: in torchao's format, their class and its attributes."""
    if format_ != "torchao":
        return {}
    attributes = {"block_size": 16, "orig_dtype": {"_type": "torch.dtype", "_data": dtype}}
    parts = [part.removeprefix("_weight_") for part in _AO]
    packed = {"_type": "NVFP4Tensor", "_data": attributes, "_tensor_data_names": parts}
    kinds = {}
    for name in weights:
        layer, _, last = name.rpartition(".")
        kinds[f"{layer}.weight" if last in _AO else name] = packed if last in _AO else {"_type": "Tensor"}
    return {name: json.dumps(kind) for name, kind in kinds.items()} | {"tensor_names": json.dumps(list(kinds))}


def _storage_for(format_: str, packed: Mapping[str, Packed]) -> Storage:
    """Return the storage of a format in which all weights can be stored; raise ValueError if there is none."""
    choices = [storage for (project, _), storage in STORAGES.items() if project == format_]
    first = next(iter(packed.values())).quantizer
    storage = next((one for one in choices if one.stores(first)), None)
    for name, weight in packed.items():
        if storage is None or not storage.stores(weight.quantizer):
            valid = " or ".join(one.dialect.quantizer for one in choices)
            one = f"like {first}, " if storage else ""
            raise ValueError(
                f"{name} is quantized by {weight.quantizer}; {format_} stores all weights {one}as {valid}, with any "
                "number of rows in a block"
            )
        if weight.shape[1] % storage.columns:
            raise ValueError(f"{name}: rows of {weight.shape[1]} elements are not whole blocks of {storage.columns}")
    return storage  # type: ignore[return-value]


def _unread(project: str, kind: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return messages on readers that would not decode the values of training.

    kind: the `model_type` of config.json. tensors: the tensor scale of each packed layer.
    """
    notes = []
    if project == "modelopt":
        notes.append("transformers does not read ModelOpt's weights; vLLM, TensorRT-LLM and fewbits do")
    elif kind == "gpt2":
        notes.append("transformers reads packed weights of nn.Linear only, but its GPT-2 has Conv1D")
    if kind == "mixtral" and project == "torchao":
        notes.append("transformers 5.23 does not read packed experts")
    elif kind == "mixtral" and tensors and project == "compressed-tensors":
        notes.append("transformers 5.23 leaves out the tensor scale of experts in NVFP4, so its logits differ")
    apart = [
        names
        for first, *others in _JOINED
        for layer, scale in tensors.items()
        if layer.endswith(f".{first}")
        and any(not torch.equal(scale, tensors.get(layer.removesuffix(first) + other, scale)) for other in others)
        for names in (", ".join((first, *others)),)
    ]
    if apart:
        notes.append(
            f"vLLM joins {' and '.join(dict.fromkeys(apart))}, and takes one tensor scale for them; here they differ, "
            "so its values would, too"
        )
    return notes


@dataclass(frozen=True)
class PackedFolder:
    """A folder of safetensors with packed weights, which `read` decodes."""

    folder: SafetensorsFolder
    storage: Storage
    transposed: bool  # matrices of blocks are in × out, but packed ones are out × in
    dtype: torch.dtype  # to which decoded weights are rounded

    @property
    def origin(self) -> str:
        return self.folder.origin

    @property
    def names(self) -> Collection[str]:
        """The names of the weights, packed or not, without those of scales."""
        other = (self.storage.scales, self.storage.tensor, *_OF_INPUTS)
        pairs = (name.rpartition(".") for name in self.folder.names)
        return [
            f"{layer}.weight" if last == self.storage.codes else layer + dot + last
            for layer, dot, last in pairs
            if last not in other
        ]

    def is_packed(self, name: str) -> bool:
        parts = {self.storage.codes, self.storage.scales} - {"weight"}
        return name.endswith(".weight") and any(f"{name[:-6]}{part}" in self.folder.tensors for part in parts)

    def shape(self, name: str) -> tuple[int, ...]:
        if not self.is_packed(name):
            return self.folder.shape(name)
        rows, columns = self.folder.shape(f"{name[:-6]}{self.storage.codes}")
        return (2 * columns, rows) if self.transposed else (rows, 2 * columns)

    def read(self, name: str) -> Tensor:
        if not self.is_packed(name):
            return self.folder.read(name)
        layer, storage = name.removesuffix("weight"), self.storage
        needed = [layer + part for part in (storage.codes, storage.scales, storage.tensor) if part]
        if missing := [part for part in needed if part not in self.folder.tensors]:
            raise ValueError(f"{self.origin} has no tensor {missing[0]}, which the packed weight {name} needs")
        codes, scales, *tensor = (self.folder.tensors[part] for part in needed)
        rows, columns = codes.shape
        across = 2 * columns // storage.columns
        blocked = -(-rows // 128) * 512 * -(-across // 4)  # the size of swizzled scales, which torchao itself writes
        if storage.codes == _AO[0] and scales.shape != (rows, across) and scales.numel() == blocked:
            scales = scales.view(torch.uint8).flatten()[swizzle(rows, across, scales.device)]
        if scales.shape != (rows, across) or codes.dtype != torch.uint8:
            raise ValueError(
                f"{self.origin}: {needed[1]} has the shape {list(scales.shape)}, but codes {list(codes.shape)} in "
                f"blocks of {storage.columns} need {[rows, across]}"
            )
        value = storage.decode(codes, scales.view(torch.uint8), tensor[0].float().view(1, 1) if tensor else None)
        value = value.to(self.dtype).float()
        return value.mT if self.transposed else value


def packed_folder(folder: SafetensorsFolder, fields: Fields, transposed: bool) -> PackedFolder:
    """Return a folder with packed weights, by its config.json; raise ValueError if their format is not supported."""
    nested = fields.get(QUANTIZATION)
    quantization = Fields(f"{fields.origin}: {QUANTIZATION}", nested if isinstance(nested, dict) else {})
    for storage in STORAGES.values():
        if all(quantization.get(key, None) == storage.config[key] for key in _IDENTIFYING if key in storage.config):
            dtype = getattr(torch, str(fields.get("dtype", fields.get("torch_dtype", "float32"))), torch.float32)
            return PackedFolder(folder, storage, transposed, dtype)
    shown = {key: quantization.get(key, None) for key in _IDENTIFYING}
    raise ValueError(
        f"{quantization.origin} {shown} is not supported; supported are {', '.join(' '.join(key) for key in STORAGES)}"
    )


_IDENTIFYING = (
    "quant_method",
    "format",
    "quant_algo",
    "quant_type",
)  # the fields of `quantization_config` that name a format


def _compressed(name: str, strategy: str, block: int, scale_dtype: str) -> dict[str, Any]:
    """Return compressed-tensors' configuration of packed weights and unquantized inputs."""
    numbers = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "strategy": strategy, "group_size": block, "scale_dtype": scale_dtype},
        "input_activations": None,
        "output_activations": None,
        "format": name,
    }
    head = {"quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed"}
    return {**head, "config_groups": {"group_0": group}, "kv_cache_scheme": None}


def _modelopt(algorithm: str) -> dict[str, Any]:
    """Return ModelOpt's configuration of packed weights."""
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "modelopt", "quant_algo": algorithm, "config_groups": groups}


_CT = ("weight_packed", "weight_scale")
_AO = ("_weight_qdata", "_weight_scale", "_weight_per_tensor_scale")
_AO_CONFIG = {"_type": "NVFP4WeightOnlyConfig", "_version": 1, "_data": {"use_dynamic_per_tensor_scale": True}}
_TENSOR_SHAPE: Final[Mapping[str, tuple[int, ...]]] = {"torchao": ()}  # of a scale of the whole tensor; others: (1,)
STORAGES: Final[Mapping[tuple[str, str], Storage]] = {
    ("compressed-tensors", "nvfp4"): Storage(
        DIALECTS["compressed-tensors-nvfp4"],
        *(*_CT, "weight_global_scale"),
        _compressed("nvfp4-pack-quantized", "tensor_group", 16, "torch.float8_e4m3fn"),
    ),
    ("compressed-tensors", "mxfp4"): Storage(
        DIALECTS["compressed-tensors-mxfp4"],
        *(*_CT, ""),
        _compressed("mxfp4-pack-quantized", "group", 32, "torch.uint8"),
    ),
    **{  # the last is read only: exports say nothing of inputs
        ("modelopt", name): Storage(
            DIALECTS["modelopt-nvfp4"], "weight", "weight_scale", "weight_scale_2", _modelopt(name)
        )
        for name in ("W4A16_NVFP4", "NVFP4")
    },
    ("torchao", "nvfp4"): Storage(
        DIALECTS["torchao-nvfp4"],
        *_AO,
        {"quant_method": "torchao", "quant_type": {"default": _AO_CONFIG}},
        "modules_to_not_convert",
    ),
}
FORMATS: Final = tuple(dict.fromkeys(project for project, _ in STORAGES))
