"""Check packed checkpoints: headers, shapes of scales, values of scales, kept layers, and the error against a source.

Nothing here trusts a file. Headers are read with limits, tensors through read-only memory maps in parts, and a file
outside the checkpoint's folder is never opened. A file that breaks the safetensors format is refused (ValueError); what
a well-formed checkpoint has wrong is a `Finding`.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
import reprlib
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.kernels.formats import TABLE
from fewbits.kernels.packing import swizzle
from fewbits.kernels.reference.elements import values_of
from fewbits.models.importing.safetensors_files import json_object

HEADER_LIMIT = 12_000_000  # bytes of JSON, which take up to 40 times as much memory
PART = 1 << 22  # elements that are decoded at a time
CHOICES = 1_000_000  # ways to match a name and an expression, above which the match could take too long
SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64"), 8),
}
_TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NVFP4_ERROR, MXFP4_ERROR = 0.16, 0.2  # relative errors (root mean square) beyond rounding; of Gaussians: 0.10, 0.12


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: where its bytes are."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self, first: int, last: int) -> Tensor:
        """Return the elements `first` to `last`, in the order of the file, or fewer at its end; there must be some."""
        size = SIZES[self.dtype]
        count = min(last, math.prod(self.shape)) - first
        data = np.memmap(self.file, np.uint8, "r", self.start + first * size, (count * size,))
        return torch.from_numpy(np.array(data)).view(_TORCH.get(self.dtype, torch.uint8))


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
    for name, parts in modules.items():
        if any(_matches(name, pattern) for pattern in kept):
            verdict.findings.append(Finding(name, "is quantized, but the config keeps it in high precision"))
        _check_module(name, parts, original, verdict)
    _check_left(tensors, modules, kept, verdict)
    for name, stored in tensors.items():
        size = math.prod(stored.shape)
        if stored.dtype in _TORCH and 0 < size <= PART and not stored.read(0, size).isfinite().all():
            verdict.findings.append(Finding(name, "has infinite values or NaN"))
    for name in original.keys() - tensors.keys():
        trained = name.endswith((".weight", ".bias")) and name != "lm_head.weight"  # no buffers; the head may be tied
        if trained and name.removesuffix(".weight") not in modules:
            verdict.findings.append(Finding(name, "is in the source, but not here"))
    known = {id(part) for parts in modules.values() for part in parts.values()}
    for name, stored in tensors.items():
        scaled = re.search(r"\._?weight_(scale|scale_2|global_scale|scale_inv|per_tensor_scale)$", name)
        if scaled and id(stored) not in known and not _of_other_format(name[: scaled.start()], tensors):
            verdict.findings.append(Finding(name, "is a scale without a quantized weight"))
    if not modules and kind != "none":
        verdict.findings.append(Finding(str(checkpoint), f"the config says {kind}, but no tensor is packed"))
    return verdict


# Files


def survey(checkpoint: Path) -> dict[str, Stored]:
    """Return the tensors of a folder's files or of one file by name; ValueError if a file is not well-formed."""
    if checkpoint.is_file():
        return dict(_header(checkpoint))
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint}: no such file or folder")
    index = checkpoint / "model.safetensors.index.json"
    listed: dict[str, str] = {}
    if index.is_file():
        listed = json_object(_inside(index, checkpoint)).get("weight_map", {})
        if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
            raise ValueError(f"{index}: weight_map is not an object of file names")
        files = sorted(set(listed.values()))
        if wrong := [name for name in files if Path(name).name != name or not name.endswith(".safetensors")]:
            raise ValueError(f"{index}: {reprlib.repr(wrong[0])} is not the name of a safetensors file in the folder")
    else:
        files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{checkpoint} has no safetensors file")
    tensors: dict[str, Stored] = {}
    for name in files:
        for key, stored in _header(_inside(checkpoint / name, checkpoint)):
            if key in tensors:
                raise ValueError(f"{checkpoint / name}: the tensor {key} is in {tensors[key].file.name}, too")
            tensors[key] = stored
    for key, name in listed.items():
        if key not in tensors or tensors[key].file.name != name:
            raise ValueError(f"{index} lists the tensor {key} in {name}, which does not have it")
    return tensors


def _inside(path: Path, folder: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # of Hugging Face's cache, whose files are links into `blobs`
        allowed.append(folder.resolve().parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(one) for one in allowed):
        raise ValueError(f"{path} is a link to a file outside of the folder: refused")
    return path


def _header(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield name and place of each tensor of a file, after all have been checked."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(HEADER_LIMIT, size - 8):
            limit = f"refused (the limit is {HEADER_LIMIT})"
            raise ValueError(f"{path}: a header of {length} bytes in a file of {size} bytes: {limit}")
        header = json_object(path, file.read(length))
    space, begin, end = size - 8 - length, 8 + length, 0
    places: list[tuple[int, int, str, Stored]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            whole = all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, first, last))
        except (TypeError, KeyError, ValueError):
            whole, shape = False, ()
        if not whole or len(shape) > 8 or not isinstance(dtype, str) or dtype not in SIZES or not name.isprintable():
            raise ValueError(f"{path}: the entry of tensor {name[:80]!r} is not valid: {reprlib.repr(entry)}")
        if last > space or last - first != math.prod(shape) * SIZES[dtype]:
            where = f"has {last - first} bytes, at {first} of {space}"
            raise ValueError(f"{path}: tensor {name[:80]!r} of type {dtype} and shape {list(shape)} {where}")
        places.append((first, last, name, Stored(path, dtype, shape, begin + first)))
    for first, last, name, _ in sorted(places, key=lambda place: place[:3]):
        if first != end:
            raise ValueError(f"{path}: tensor {name[:80]!r} begins at byte {first}, but the one before ends at {end}")
        end = last
    if end != space:
        raise ValueError(f"{path}: the tensors have {end} bytes, but the file has {space}")
    for _, _, name, stored in places:
        yield name, stored


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


def _unchecked(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> str:
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


def _of_other_format(module: str, tensors: Mapping[str, Stored]) -> bool:
    """Tell whether a module's weight is in FP8, INT8, or codes of 32 bits."""
    weights = [tensors[name] for name in (f"{module}.weight", f"{module}.weight_packed") if name in tensors]
    return any(weight.dtype in ("F8_E4M3", "F8_E5M2", "I8", "I32") for weight in weights)


def _kept(config: Mapping[str, Any]) -> list[str]:
    keys = ("ignore", "exclude_modules", "modules_to_not_convert")
    listed: Any = next((config[key] for key in keys if config.get(key)), [])
    return [pattern for pattern in listed if isinstance(pattern, str)] if isinstance(listed, list) else []


def _matches(name: str, pattern: str) -> bool:
    """Tell whether a module is meant: by its name, a glob, or as in compressed-tensors `re:EXPRESSION`."""
    if pattern.startswith("re:"):
        repeats, factor = _choices(pattern)
        if factor * math.comb(len(name) + repeats, repeats) > CHOICES:
            raise ValueError(f"the ignore pattern {reprlib.repr(pattern)} of the config is too complex: refused")
        try:
            return re.match(pattern.removeprefix("re:"), name) is not None
        except (re.error, RecursionError, OverflowError):
            return False
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


@functools.lru_cache(maxsize=4096)
def _choices(pattern: str) -> tuple[int, int]:
    """Bound the ways to match an expression: (repetitions whose lengths are free, factor of all other choices)."""
    if len(pattern) > 2000 or re.search(r"\(\?[a-zA-Z(]", pattern):  # flags, for example, change what the rest means
        return 0, CHOICES + 1
    text = re.sub(r"\[\^?\]?[^]]*\]", "x", re.sub(r"(?s)\\.", "x", pattern)).replace("(?", "(")
    if re.search(r"\)[*+{]", text):
        return 0, CHOICES + 1
    repeats, factor = len(re.findall(r"[*+{]", text)), 2 ** text.count("?")
    for alternatives in re.split(r"[()]", text):
        factor *= 1 + alternatives.count("|")
    return repeats, factor


def _check_left(
    tensors: Mapping[str, Stored], modules: Mapping[str, object], kept: list[str], verdict: Verdict
) -> None:
    """Find weights in high precision that the config does not keep, and whose namesakes in other layers are packed."""
    packed = {name.rpartition(".")[2] for name in modules}
    for name, stored in tensors.items():
        module, _, last = name.rpartition(".")
        wide = last == "weight" and len(stored.shape) == 2 and stored.dtype in ("BF16", "F16", "F32")
        alike = wide and module not in modules and module.rpartition(".")[2] in packed
        if alike and not any(_matches(module, pattern) for pattern in kept):
            text = f"is stored in {stored.dtype}, but the config does not keep it, and others of its name are packed"
            verdict.findings.append(Finding(module, text))


# Modules

_GGUF = {"nvfp4": (36, 4, NVFP4_ERROR), "mxfp4": (17, 1, MXFP4_ERROR)}  # bytes of a block, of its scales, largest error
_PARTS = (  # the names of scales, of torchao in the second
    {"weight_scale": "scale", "weight_global_scale": "g", "weight_scale_2": "d"},
    {"_weight_scale": "scale", "_weight_per_tensor_scale": "d"},
)


def _modules(tensors: Mapping[str, Stored]) -> dict[str, dict[str, Stored]]:
    """Return for each module with a packed weight its parts: codes, scale, and the tensor scale g or d."""
    modules: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        module, _, last = name.rpartition(".")
        if last in ("weight_packed", "weight", "_weight_qdata") and stored.dtype == "U8":
            torchao = last == "_weight_qdata"
            modules[module] = {"codes": stored} | ({"torchao": stored} if torchao else {})
            for suffix, part in _PARTS[torchao].items():
                if f"{module}.{suffix}" in tensors:
                    modules[module][part] = tensors[f"{module}.{suffix}"]
    return modules


def _check_module(name: str, parts: dict[str, Stored], original: Mapping[str, Stored], verdict: Verdict) -> None:
    def found(text: str) -> None:
        verdict.findings.append(Finding(name, text))

    codes, scale, torchao = parts["codes"], parts.get("scale"), "torchao" in parts
    rows, cols = (*codes.shape, 0, 0)[:2]
    cols *= 2
    tensor_scale = {"g", "d"} & parts.keys()
    format_ = "mxfp4" if scale and scale.dtype in ("U8", "F8_E8M0") and not tensor_scale else "nvfp4"
    width, types = (32, ("U8", "F8_E8M0")) if format_ == "mxfp4" else (16, ("F8_E4M3",))
    swizzled, shape, padded = False, (rows, cols // width), (-(-rows // 128) * 128, -(-cols // width // 4) * 4)
    verdict.rows.append((name, format_, f"{rows} × {cols}", None))
    if len(codes.shape) != 2 or cols % width or not cols * rows:
        found(f"has packed codes of shape {list(codes.shape)}: expected are two sizes, with whole blocks of {width}")
    elif scale is None:
        found("has packed codes but no weight_scale")
    elif scale.dtype not in types:
        found(f"has block scales of type {scale.dtype}: expected is {types[0]}")
    elif scale.shape != shape and not (swizzled := torchao and math.prod(scale.shape) == math.prod(padded)):
        hint = ", the size of swizzled and padded scales" if math.prod(scale.shape) == math.prod(padded) else ""
        found(f"has scales of shape {list(scale.shape)}{hint}: expected {list(shape)} for codes of {rows} × {cols}")
    elif format_ == "nvfp4" and not tensor_scale and not torchao:
        found("has no tensor scale (weight_global_scale or weight_scale_2)")
    elif d := _tensor_scale(parts, found) if tensor_scale else 1.0:
        lost = None if swizzled else functools.partial(_lost, codes, scale, width)
        largest = _check_scales(scale, format_, found, math.prod(scale.shape) - math.prod(shape), lost) * 6 * d
        if not 1e-7 < largest < 1e4 and 1e-7 < largest / d**2 < 1e4:
            found(f"has a tensor scale that looks inverted: the largest weight would be {largest:.3g}")
        source = original.get(f"{name}.weight")
        if source is not None and source.dtype in _TORCH and source.shape == (rows, cols):
            if not swizzled or rows * cols // width <= 4 * PART:
                error = _against(parts, shape, swizzled, d, format_, source, found)
                verdict.rows[-1] = (name, format_, f"{rows} × {cols}", error)
        elif original:
            found(f"has no weight of {rows} × {cols} in the source")


def _tensor_scale(parts: Mapping[str, Stored], found: Any) -> float | None:
    """Return d, by which values are multiplied."""
    kind = "g" if "g" in parts else "d"
    stored = parts[kind]
    if stored.dtype != "F32" or math.prod(stored.shape) != 1:
        found(f"has a tensor scale of type {stored.dtype} and shape {list(stored.shape)}: one F32 is expected")
        return None
    value = float(stored.read(0, 1))
    if not math.isfinite(value) or value <= 0:
        found(f"has the tensor scale {value:g}: a finite number > 0 is expected")
        return None
    return 1 / value if kind == "g" else value


def _lost(codes: Stored, scale: Stored, width: int) -> int:
    """Return the number of blocks whose scale is zero, but whose codes are not."""
    lost, step = 0, PART // width
    for first in range(0, math.prod(scale.shape), step):
        zero = (scale.read(first, first + step).view(torch.uint8) & 0x7F) == 0
        some = (codes.read(first * width // 2, (first + step) * width // 2).view(-1, width // 2) & 0x77).any(1)
        lost += int((zero & some).sum())
    return lost


def _check_scales(scale: Stored, format_: str, found: Any, padding: int, lost: Callable[[], int] | None) -> float:
    """Check the values of block scales, of which `padding` are zeros that no block has, and return the largest.

    lost: counts the zeros that are wrong; otherwise all are.
    """
    counts = torch.zeros(256, dtype=torch.long)
    for first in range(0, math.prod(scale.shape), PART):
        counts += torch.bincount(scale.read(first, first + PART).view(torch.uint8), minlength=256)
    return _check_counts(counts, format_, found, padding, lost)


def _check_counts(
    counts: Tensor, format_: str, found: Any, padding: int = 0, lost: Callable[[], int] | None = None
) -> float:
    """Check how often each byte is a block scale, and return the largest scale."""
    size, values = int(counts.sum()), _scale_values(format_)
    nan, zero = int(counts[values.isnan()].sum()), int(counts[values == 0].sum()) - padding
    negative = int(counts[0x80:].sum()) if format_ == "nvfp4" else 0
    if negative:
        found(f"has {negative} negative block scales")
    if nan:
        found(f"has {nan} block scales that are NaN")
    if zero == size - padding:
        found("has only zero block scales")
    elif zero > 0 and (zero := lost() if lost and format_ == "nvfp4" else zero):
        found(f"has {zero} of {size - padding} block scales 0, which loses these blocks")
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

        def found(text: str, name: str = name) -> None:
            verdict.findings.append(Finding(name, text))

        size, several, limit = _GGUF[format_]
        shape, counts = file.shape(name), torch.zeros(256, dtype=torch.long)
        data = tensor.data.reshape(-1, size)
        for first in range(0, len(data), PART // 16):
            scales = np.ascontiguousarray(data[first : first + PART // 16, :several])
            counts += torch.bincount(torch.from_numpy(scales).flatten(), minlength=256)
        factor = file.tensors.get(f"{module}.scale")
        d = 1.0 if factor is None else float(factor.data.flat[0]) if factor.data.size == 1 else math.nan
        if not (math.isfinite(d) and d > 0):
            found(f"has the tensor scale {d:g}: one finite number > 0 is expected")
        elif not 1e-7 < (largest := _check_counts(counts, format_, found) * 6 * d) < 1e4:
            found(f"has a tensor scale that looks inverted: the largest weight would be {largest:.3g}")
        error = None
        if original is not None and name in original.tensors and original.shape(name) == shape:
            want = original.read(name)
            error = float((file.read(name) - want).norm() / want.norm().clamp_min(1e-30))
            if not error <= limit:
                found(f"has a relative error of {error:.3g} against the source, above {limit}")
        elif original is not None:
            found(f"has no weight of {' × '.join(map(str, shape))} in the source")
        verdict.rows.append((name, format_, " × ".join(map(str, shape)), error))
    if not verdict.rows:
        raise ValueError(f"{checkpoint} has no weight in NVFP4 or MXFP4, and others are not checked")
    return verdict


def _against(
    parts: Mapping[str, Stored],
    shape: tuple[int, int],
    swizzled: bool,
    d: float,
    format_: str,
    source: Stored,
    found: Any,
) -> float:
    """Return the relative error against the source; if it is too large, name the known mistake that explains it."""
    width, limit = (32, MXFP4_ERROR) if format_ == "mxfp4" else (16, NVFP4_ERROR)
    codes, scale, (rows, across) = parts["codes"], parts["scale"], shape
    tile = 128 * across  # scales that swizzling permutes among themselves
    blocked: Any = {}
    bytes_of: Callable[[int, int], Tensor] = lambda first, last: scale.read(first, last).view(torch.uint8)  # noqa: E731
    if swizzled:
        order = swizzle(rows, across, torch.device("cpu")).flatten()
        rowwise = bytes_of(0, math.prod(scale.shape))[order]
        bytes_of = lambda first, last: rowwise[first:last]  # noqa: E731
    if rows % 128 == 0 and across % 4 == 0 and tile <= PART:
        blocked = {"step": tile, "order": swizzle(128, across, torch.device("cpu")).flatten()}
    table, pairs = (
        _scale_values(format_),
        values_of(torch.arange(256)[:, None] >> torch.tensor([0, 4]) & 15, TABLE["e2m1"]),
    )

    def error(d: float, *, swapped: bool = False, step: int = PART // width, order: Tensor | None = None) -> float:
        total = difference = 0.0
        for first in range(0, rows * across, step):
            last = first + step
            scales = table.index_select(0, bytes_of(first, last).int())
            scales = scales if order is None else scales[order]
            packed = codes.read(first * width // 2, last * width // 2).int()
            q = (pairs.flip(1) if swapped else pairs).index_select(0, packed)
            want = source.read(first * width, last * width).float().view(-1, width)
            wrong = q.view(-1, width) * scales[:, None] * d - want
            total += float(want.norm()) ** 2
            difference += float(wrong.norm()) ** 2
        return math.sqrt(difference / total) if total else float(difference > 0)

    measured = error(d)
    if measured <= limit:
        return measured
    if error(1 / d) <= limit:
        reason = "the tensor scale is inverted"
    elif error(d, swapped=True) <= limit:
        reason = "the nibbles of each byte are swapped"
    elif blocked and not swizzled and error(d, **blocked) <= limit:
        reason = "the block scales are swizzled"
    else:
        reason = "no known mistake explains it"
    found(f"has a relative error of {measured:.3g} against the source, above {limit}: {reason}")
    return measured
