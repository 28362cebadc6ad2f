"""Check packed checkpoints: headers, shapes of scales, values of scales, kept layers, and the error against a source.

A file outside the checkpoint's folder is never opened, and a file that breaks the safetensors format is refused
(ValueError); what a well-formed checkpoint has wrong is a `Finding`.
"""

from __future__ import annotations

import fnmatch
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.kernels.formats import TABLE
from fewbits.kernels.packing import swizzle
from fewbits.kernels.reference.elements import values_of
from fewbits.models.importing.packed_tensors import STORAGES
from fewbits.models.importing.safetensors_files import INDEX, dtype_name, json_object, read_file, read_files, read_index

PART = 1 << 22  # elements that are decoded at a time
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Find = Callable[[str], None]  # records a defect
NVFP4_ERROR, MXFP4_ERROR = 0.16, 0.2  # relative errors (root mean square) beyond rounding; of Gaussians: 0.10, 0.12


@dataclass(frozen=True)
class Finding:
    """One defect: the tensor or module that has it, and what is wrong."""

    name: str
    text: str


@dataclass
class Verdict:
    """What `verify` found. rows: for each quantized module its name, format, shape and error against the source."""

    kind: str
    rows: list[tuple[str, str, str, float | None]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def find(self, name: str, text: str) -> None:
        self.findings.append(Finding(name, text))


def verify(checkpoint: Path, source: Path | None = None) -> Verdict:
    """Check a folder with safetensors files, or one file; ValueError if a file is damaged or refused."""
    if checkpoint.suffix == ".gguf":
        return _verify_gguf(checkpoint, source)
    tensors, config = survey(checkpoint), _config(checkpoint)
    original = survey(source) if source else {}
    kept, kind = _kept(config), _kind(config)
    if reason := _unchecked(config, tensors):
        raise ValueError(f"{checkpoint}: {reason}; `fewbits verify` checks only NVFP4 and MXFP4")
    verdict = Verdict(kind)
    modules = _modules(tensors)
    for name, module in modules.items():
        if any(_matches(name, pattern) for pattern in kept):
            verdict.find(name, "is quantized, but the config keeps it in high precision")
        _check_module(name, module, original, verdict)
    _check_left(tensors, modules, kept, verdict)
    for name, stored in tensors.items():
        if stored.dtype in FLOATS and stored.numel() <= PART and not stored.isfinite().all():
            verdict.find(name, "has infinite values or NaN")
    for name in original.keys() - tensors.keys():
        trained = name.endswith((".weight", ".bias")) and name != "lm_head.weight"  # no buffers; the head may be tied
        if trained and name.removesuffix(".weight") not in modules:
            verdict.find(name, "is in the source, but not here")
    known = {id(part) for module in modules.values() for part in (module.scale, module.tensor)}
    for name, stored in tensors.items():
        scaled = re.search(r"\._?weight_(scale|scale_2|global_scale|scale_inv|per_tensor_scale)$", name)
        if scaled and id(stored) not in known and not _of_other_format(name[: scaled.start()], tensors):
            verdict.find(name, "is a scale without a quantized weight")
    if not modules and kind != "none":
        verdict.find(str(checkpoint), f"the config says {kind}, but no tensor is packed")
    return verdict


# Files


def survey(checkpoint: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder's files or of one file by name; ValueError if a file is not well-formed."""
    if checkpoint.is_file():
        return read_file(checkpoint)
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}: no such file or folder")
    index = checkpoint / INDEX
    listed = read_index(_inside(index, checkpoint)) if index.is_file() else {}
    files = sorted({checkpoint / name for name in listed.values()} or checkpoint.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{checkpoint} has no safetensors file")
    return read_files([_inside(file, checkpoint) for file in files], listed)


def _inside(path: Path, folder: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # of Hugging Face's cache, whose files are links into `blobs`
        allowed.append(folder.resolve().parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(one) for one in allowed):
        raise ValueError(f"{path} is a link to a file outside of the folder: refused")
    return path


# Configs


def _config(checkpoint: Path) -> dict[str, Any]:
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    for name, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        path = folder / name
        if path.is_file():
            found = json_object(_inside(path, folder)).get(key)
            if isinstance(found, dict):
                return found
    return {}


def _kind(config: Mapping[str, Any]) -> str:
    method = config.get("quant_method") or ("modelopt" if "quant_algo" in config else "none")
    return f"{_word(method)} {_word(config.get('format') or config.get('quant_algo') or '')}".strip()


def _word(value: object) -> str:
    """Return a short, printable name of a config as it is, and any other value quoted and shortened."""
    plain = isinstance(value, str) and value.isprintable() and len(value) <= 40
    return str(value) if plain else reprlib.repr(value)


def _unchecked(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return why the checkpoint's format is not checked; empty if it is."""
    kind, method = _kind(config), config.get("quant_method") or "modelopt"
    name = config.get("format" if method == "compressed-tensors" else "quant_algo") or ""
    if method == "torchao":
        quantized = config.get("quant_type")
        default = quantized.get("default") if isinstance(quantized, dict) else None
        name = default.get("_type") if isinstance(default, dict) else "without a default type"
    elif config and method not in ("compressed-tensors", "modelopt"):
        return f"the format {kind} is not checked"
    if name and not re.search("FP4|^mixed", str(name), re.IGNORECASE):
        return f"the format {kind} is not checked"
    modules = {module for module, _, last in (name.rpartition(".") for name in tensors) if last.startswith("weight")}
    other = not _modules(tensors) and any(_of_other_format(module, tensors) for module in modules)
    if other or any(name.endswith(".weight.absmax") for name in tensors):  # these are of bitsandbytes
        return "the weights are quantized in a format that is not checked"
    return ""


def _of_other_format(module: str, tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether a module's weight is in FP8, INT8, or codes of 32 bits."""
    weights = [tensors[name] for name in (f"{module}.weight", f"{module}.weight_packed") if name in tensors]
    return any(weight.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32) for weight in weights)


def _kept(config: Mapping[str, Any]) -> list[str]:
    keys = ("ignore", "exclude_modules", "modules_to_not_convert")
    listed: Any = next((config[key] for key in keys if config.get(key)), [])
    return [pattern for pattern in listed if isinstance(pattern, str)] if isinstance(listed, list) else []


def _matches(name: str, pattern: str) -> bool:
    """Tell whether a module is meant: by its name, a glob, or as in compressed-tensors `re:EXPRESSION`."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), name) is not None
        except (re.error, RecursionError, OverflowError):
            return False
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _check_left(
    tensors: Mapping[str, Tensor], modules: Mapping[str, object], kept: list[str], verdict: Verdict
) -> None:
    """Find weights in high precision that the config does not keep, and whose namesakes in other layers are packed."""
    packed = {name.rpartition(".")[2] for name in modules}
    for name, stored in tensors.items():
        module, _, last = name.rpartition(".")
        wide = last == "weight" and stored.ndim == 2 and stored.dtype in FLOATS
        alike = wide and module not in modules and module.rpartition(".")[2] in packed
        if alike and not any(_matches(module, pattern) for pattern in kept):
            kind = dtype_name(stored.dtype)
            verdict.find(module, f"is stored in {kind}, but the config does not keep it, and others like it are packed")


# Modules

_GGUF = {"nvfp4": (36, 4, NVFP4_ERROR), "mxfp4": (17, 1, MXFP4_ERROR)}  # bytes of a block, of its scales, largest error
# By the name of codes. MXFP4 of compressed-tensors has no scale of the whole tensor, and otherwise the names of NVFP4.
_STORAGES = {storage.codes: storage for storage in STORAGES.values() if storage.tensor}


@dataclass(frozen=True)
class _Module:
    """The tensors of a packed weight. tensor: the scale of the whole tensor. inverse: values are divided by it."""

    codes: Tensor
    scale: Tensor | None
    tensor: Tensor | None
    inverse: bool
    torchao: bool


def _modules(tensors: Mapping[str, Tensor]) -> dict[str, _Module]:
    modules = {}
    for name, codes in tensors.items():
        module, _, last = name.rpartition(".")
        if last in _STORAGES and codes.dtype == torch.uint8:
            storage = _STORAGES[last]
            scale, tensor = (tensors.get(f"{module}.{part}") for part in (storage.scales, storage.tensor))
            inverse, torchao = storage.dialect.layout.tensor == "g", storage is STORAGES["torchao", "nvfp4"]
            modules[module] = _Module(codes, scale, tensor, inverse, torchao)
    return modules


def _check_module(name: str, module: _Module, original: Mapping[str, Tensor], verdict: Verdict) -> None:
    find = partial(verdict.find, name)
    codes, scale = module.codes, module.scale
    rows, cols = (*codes.shape, 0, 0)[:2]
    cols *= 2
    of_mx = (torch.uint8, torch.float8_e8m0fnu)
    format_ = "mxfp4" if scale is not None and scale.dtype in of_mx and module.tensor is None else "nvfp4"
    width, types = (32, of_mx) if format_ == "mxfp4" else (16, (torch.float8_e4m3fn,))
    shape, padded = (rows, cols // width), (-(-rows // 128) * 128, -(-cols // width // 4) * 4)
    swizzled = False
    verdict.rows.append((name, format_, f"{rows} × {cols}", None))
    if codes.ndim != 2 or cols % width or not cols * rows:
        find(f"has packed codes of shape {list(codes.shape)}: expected are two sizes, with whole blocks of {width}")
    elif scale is None:
        find("has packed codes but no weight_scale")
    elif scale.dtype not in types:
        find(f"has block scales of type {dtype_name(scale.dtype)}: expected is {dtype_name(types[0])}")
    elif scale.shape != shape and not (swizzled := module.torchao and scale.numel() == math.prod(padded)):
        hint = ", the size of swizzled and padded scales" if scale.numel() == math.prod(padded) else ""
        find(f"has scales of shape {list(scale.shape)}{hint}: expected {list(shape)} for codes of {rows} × {cols}")
    elif format_ == "nvfp4" and module.tensor is None and not module.torchao:
        find("has no tensor scale (weight_global_scale or weight_scale_2)")
    elif d := _tensor_scale(module, find):
        scales, blocks = scale.view(torch.uint8).flatten(), codes.view(-1, width // 2)
        if swizzled:
            scales = scales[swizzle(*shape, scales.device).flatten()]
        largest = _check_scales(torch.bincount(scales, minlength=256), format_, find, lambda: _lost(scales, blocks))
        largest *= 6 * d
        if not 1e-7 < largest < 1e4 and 1e-7 < largest / d**2 < 1e4:
            find(f"has a tensor scale that looks inverted: the largest weight would be {largest:.3g}")
        source = original.get(f"{name}.weight")
        if source is not None and source.dtype in FLOATS and source.shape == (rows, cols):
            error = _against(blocks, scales, shape, d, format_, source, find)
            verdict.rows[-1] = (name, format_, f"{rows} × {cols}", error)
        elif original:
            find(f"has no weight of {rows} × {cols} in the source")


def _tensor_scale(module: _Module, find: Find) -> float | None:
    """Return the factor of all values of a weight; None if the stored one is not valid."""
    stored = module.tensor
    if stored is None:
        return 1.0
    if stored.dtype != torch.float32 or stored.numel() != 1:
        kind = dtype_name(stored.dtype)
        find(f"has a tensor scale of type {kind} and shape {list(stored.shape)}: one float32 is expected")
        return None
    value = stored.item()
    if not math.isfinite(value) or value <= 0:
        find(f"has the tensor scale {value:g}: a finite number > 0 is expected")
        return None
    return 1 / value if module.inverse else value


def _lost(scales: Tensor, blocks: Tensor) -> int:
    """Return the number of blocks whose scale is zero, but whose codes are not."""
    return int((blocks[(scales & 0x7F) == 0] & 0x77).any(1).sum())


def _check_scales(counts: Tensor, format_: str, find: Find, lost: Callable[[], int] | None = None) -> float:
    """Check how often each byte is a block scale, and return the largest scale.

    lost: counts the scales of NVFP4 that are wrongly 0; without it, all are wrong.
    """
    size, values = int(counts.sum()), _scale_values(format_)
    nan, zero = int(counts[values.isnan()].sum()), int(counts[values == 0].sum())
    negative = int(counts[0x80:].sum()) if format_ == "nvfp4" else 0
    if negative:
        find(f"has {negative} negative block scales")
    if nan:
        find(f"has {nan} block scales that are NaN")
    if zero == size:
        find("has only zero block scales")
    elif zero and (zero := lost() if lost and format_ == "nvfp4" else zero):
        find(f"has {zero} of {size} block scales 0, which loses these blocks")
    return float(values[counts > 0].nan_to_num(0).max())


def _scale_values(format_: str) -> Tensor:
    """Return the value of each byte that stores a block scale."""
    return values_of(torch.arange(256), TABLE["e8m0" if format_ == "mxfp4" else "e4m3"])


def _verify_gguf(checkpoint: Path, source: Path | None) -> Verdict:
    """Check the weights in NVFP4 and MXFP4 of a GGUF file. source: a GGUF file with the same names."""
    from fewbits.models.importing.gguf import GgufFile

    if source is not None and source.suffix != ".gguf":
        raise ValueError(f"{source}: the source of a GGUF file is a GGUF file, which has the same names of tensors")
    file, original = GgufFile.open(checkpoint), GgufFile.open(source) if source else None
    verdict = Verdict("GGUF")
    for name, tensor in file.tensors.items():
        format_, module = tensor.tensor_type.name.lower(), name.removesuffix(".weight")
        if format_ not in _GGUF:
            continue
        find = partial(verdict.find, name)
        size, several, limit = _GGUF[format_]
        shape = file.shape(name)
        scales = np.ascontiguousarray(tensor.data.reshape(-1, size)[:, :several])
        counts = torch.bincount(torch.from_numpy(scales).flatten(), minlength=256)
        factor = file.tensors.get(f"{module}.scale")
        d = 1.0 if factor is None else float(factor.data.flat[0]) if factor.data.size == 1 else math.nan
        if not (math.isfinite(d) and d > 0):
            find(f"has the tensor scale {d:g}: one finite number > 0 is expected")
        elif not 1e-7 < (largest := _check_scales(counts, format_, find) * 6 * d) < 1e4:
            find(f"has a tensor scale that looks inverted: the largest weight would be {largest:.3g}")
        error = None
        if original is not None and name in original.tensors and original.shape(name) == shape:
            want = original.read(name)
            error = float((file.read(name) - want).norm() / want.norm().clamp_min(1e-30))
            if not error <= limit:
                find(f"has a relative error of {error:.3g} against the source, above {limit}")
        elif original is not None:
            find(f"has no weight of {' × '.join(map(str, shape))} in the source")
        verdict.rows.append((name, format_, " × ".join(map(str, shape)), error))
    if not verdict.rows:
        raise ValueError(f"{checkpoint} has no weight in NVFP4 or MXFP4, and others are not checked")
    return verdict


def _against(
    blocks: Tensor, scales: Tensor, shape: tuple[int, int], d: float, format_: str, source: Tensor, find: Find
) -> float:
    """Return the relative error against the source; if it is too large, name the known mistake that explains it.

    blocks: the codes of each block. scales: one byte for each block. shape: the number of blocks across and along rows.
    """
    limit, values = MXFP4_ERROR if format_ == "mxfp4" else NVFP4_ERROR, _scale_values(format_)
    pairs = values_of(torch.arange(256)[:, None] >> torch.tensor([0, 4]) & 15, TABLE["e2m1"])
    source = source.view(len(blocks), -1)
    step = PART // source.shape[1]

    def error(d: float, scales: Tensor = scales, pairs: Tensor = pairs) -> float:
        total = difference = 0.0
        for codes, s, want in zip(blocks.split(step), scales.split(step), source.split(step), strict=True):
            q = pairs.index_select(0, codes.flatten().int()).view_as(want)
            s = values.index_select(0, s.int())
            total += float(want.float().norm()) ** 2
            difference += float((q * s[:, None] * d - want.float()).norm()) ** 2
        return math.sqrt(difference / total) if total else float(difference > 0)

    measured = error(d)
    if measured <= limit:
        return measured
    if error(1 / d) <= limit:
        reason = "the tensor scale is inverted"
    elif error(d, pairs=pairs.flip(1)) <= limit:
        reason = "the nibbles of each byte are swapped"
    elif shape[0] % 128 == shape[1] % 4 == 0 and error(d, scales[swizzle(*shape, scales.device).flatten()]) <= limit:
        reason = "the block scales are swizzled"
    else:
        reason = "no known mistake explains it"
    find(f"has a relative error of {measured:.3g} against the source, above {limit}: {reason}")
    return measured
