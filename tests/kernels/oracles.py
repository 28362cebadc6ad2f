"""Call quantizers of other packages: each adapter takes a float32 matrix and returns codes, scales and a tensor scale.

`python -m tests.kernels.oracles` writes their results on the cases of `conformance.py` to tests/golden. Packages that
are not installed keep the results that the file has.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fewbits.kernels.conformance import cases
from fewbits.kernels.dialects import DIALECTS, Dialect

Output = dict[str, Tensor]


def _run_alone(package: str, path: str, stubs: dict[str, dict[str, Any]]) -> Any:
    """Import one file of an installed package, and stub modules for its imports, without the package's own code."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    saved = {name: sys.modules.get(name) for name in stubs}
    for name, members in stubs.items():
        stub = types.ModuleType(name)
        stub.__dict__.update(members)
        stub.__path__ = []
        sys.modules[name] = stub
    try:
        where = f"{spec.submodule_search_locations[0]}/{path}"
        module = importlib.util.module_from_spec(
            importlib.util.spec_from_loader(path, importlib.machinery.SourceFileLoader(path, where))  # type: ignore[arg-type]
        )
        sys.modules[path] = module  # dataclasses look their module up
        module.__spec__.loader.exec_module(module)  # type: ignore[union-attr]
        return module
    finally:
        for name, old in saved.items():
            sys.modules.pop(name)
            if old is not None:
                sys.modules[name] = old


@cache
def _te(name: str) -> Any:
    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    te, recipes = "transformer_engine.pytorch", "transformer_engine.pytorch.custom_recipes"
    utils = _run_alone("transformer_engine", "pytorch/custom_recipes/reference_utils.py", {})
    gemm = types.SimpleNamespace(MMParams=object, GEMMType=types.SimpleNamespace(FPROP=0, WGRAD=1))
    stubs: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        te: {},
        recipes: {"gemm": gemm, "reference_utils": utils},
        f"{te}.quantized_tensor": {"Quantizer": Quantizer, "QuantizedTensorStorage": object},
    }
    return _run_alone("transformer_engine", f"pytorch/custom_recipes/{name}.py", stubs)


def te_nvfp4(x: Tensor, **options: Any) -> Output:
    module = _te("reference_nvfp4")
    quantizer = module.NVFP4QuantizerRef(dtype=None, columnwise=False, **options)
    codes, scales, _, _, amax, _ = quantizer._quantize(x)
    return {"codes": codes, "scales": scales[: x.shape[0]], "tensor": amax}


def te_fp8_block(x: Tensor) -> Output:
    blocks = x.view(x.shape[0], -1, 128)
    scale, inverse, _ = _te("reference_current_scaling")._scale_from_amax_tensor(
        torch.float32, blocks.abs().amax(-1), torch.float8_e4m3fn, eps=0.0, pow_2_scales=True
    )
    codes = (blocks * scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"codes": codes.view(x.shape), "scales": inverse}


def torchao_nvfp4(x: Tensor, two_levels: bool) -> Output:
    module = import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    tensor = module.per_tensor_amax_to_scale(x.abs().max()) if two_levels else None
    scales, codes = module.nvfp4_quantize(x, per_tensor_scale=tensor)
    values = module.NVFP4Tensor(codes, scales, 16, torch.float32, per_tensor_scale=tensor).dequantize(torch.float32)
    output = {"codes": codes, "scales": scales.view(x.shape[0], -1), "values": values}
    return output if tensor is None else {**output, "tensor": tensor.view(1)}


def torchao_mx(x: Tensor, dtype: torch.dtype, rule: str) -> Output:
    module = import_module("torchao.prototype.mx_formats.mx_tensor")
    mode = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode(rule)
    scales, codes = module.to_mx(x, dtype, 32, mode)
    return {
        "codes": codes,
        "scales": scales,
        "values": module.to_dtype(codes, scales, dtype, 32, torch.float32),
    }


def modelopt_nvfp4(x: Tensor) -> Output:
    tensor = import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor
    packed, scales, double = tensor.quantize(x.clone(), 16)
    values = packed.dequantize(torch.float32, scale=scales, double_scale=double, block_sizes={-1: 16})
    return {"codes": packed._quantized_data, "scales": scales, "tensor": double.view(1), "values": values}


def modelopt_mx(x: Tensor, bits: int) -> Output:
    module = import_module("modelopt.torch.quantization.qtensor")
    if bits == 4:
        packed, scales = module.MXFP4QTensor.quantize(x, 32)
    else:
        packed, scales = module.MXFP8QTensor.quantize(x)
    values = packed.dequantize(torch.float32, scale=scales, block_sizes={-1: 32})
    return {"codes": packed._quantized_data, "scales": scales.view(x.shape[0], -1), "values": values}


def compressed_tensors(x: Tensor, block: int) -> Output:
    helpers = import_module("compressed_tensors.quantization.utils.helpers")
    quantization = import_module("compressed_tensors.quantization")
    forward = import_module("compressed_tensors.quantization.lifecycle.forward")
    fp4 = import_module("compressed_tensors.compressors.nvfp4.helpers")
    mx = import_module("compressed_tensors.compressors.mx_utils")
    two_levels = block == 16
    args = quantization.QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group" if two_levels else "group",
        group_size=block,
        scale_dtype=torch.float8_e4m3fn if two_levels else torch.uint8,
    )
    blocks = x.view(x.shape[0], -1, block)
    g = helpers.generate_gparam(x.min(), x.max()) if two_levels else None
    scales, _ = helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=g)
    codes = fp4.quantize_and_pack_fp4(x, scales, global_scale=g, group_size=block)
    unpacked = fp4.unpack_fp4_from_uint8(codes, *x.shape, dtype=torch.float32)
    values = forward.dequantize(unpacked, scales, args=args, global_scale=g, dtype=torch.float32)
    stored = scales.to(torch.float8_e4m3fn) if two_levels else mx.compress_mx_scale(scales, torch.uint8)
    output = {"codes": codes, "scales": stored, "values": values}
    return output if g is None else {**output, "tensor": g}


@cache
def _fouroversix() -> Any:
    utils = _run_alone("fouroversix", "utils.py", {})
    names = {"DataType": utils.DataType, "RoundStyle": utils.RoundStyle, "ScaleRule": utils.ScaleRule}
    stubs: dict[str, dict[str, Any]] = {
        "fouroversix": {},
        "fouroversix.utils": names,
        "fouroversix.quantize": {},
        "fouroversix.quantize.utils": {"to_blocked": None},
    }
    return _run_alone("fouroversix", "quantize/pytorch/reference.py", stubs), utils


def fouroversix(x: Tensor, data: str, rule: str) -> Output:
    module, utils = _fouroversix()
    codes, scales, amax = module.quantize_to_fp4(
        x,
        fp4_format=utils.DataType(data),
        scale_rule=utils.ScaleRule(rule),
        use_blackwell_scale_layout=False,
    )
    output = {"codes": codes, "scales": scales.view(x.shape[0], -1)}
    return output if data == "mxfp4" else {**output, "tensor": amax.view(1)}


def gguf_nvfp4(x: Tensor) -> Output:
    """Return ggml's scales by gguf's function; ggml chooses the nearest of 16 values, the first of equals."""
    quants = import_module("gguf.quants")
    blocks = x.numpy().reshape(x.shape[0], -1, 16)
    scales = quants.NVFP4.fp32_to_ue4m3(np.abs(blocks).max(-1) / np.float32(6))
    d = quants.NVFP4.ue4m3_to_fp32(scales).astype(np.float32)
    candidates = d[..., None, None] * np.array(quants.NVFP4.kvalues, np.float32)
    best = np.abs(candidates - blocks[..., None]).argmin(-1).astype(np.uint8)
    packed = best[..., :8] | best[..., 8:] << 4
    groups = np.concatenate([scales.reshape(-1, 4), packed.reshape(-1, 32)], -1)  # 64 values, as GGUF stores them
    values = quants.NVFP4.dequantize_blocks(groups).reshape(x.shape)
    return {
        "codes": torch.from_numpy(packed.reshape(x.shape[0], -1)),
        "scales": torch.from_numpy(scales),
        "values": torch.from_numpy(values.astype(np.float32)),
    }


def gguf_mxfp4(x: Tensor) -> Output:
    quants = import_module("gguf.quants")
    with np.errstate(all="ignore"):
        stored = quants.MXFP4.quantize_blocks(x.numpy().reshape(-1, 32))
        values = quants.MXFP4.dequantize_blocks(stored).reshape(x.shape)
    return {
        "codes": torch.from_numpy(stored[:, 1:].reshape(x.shape[0], -1).copy()),
        "scales": torch.from_numpy(stored[:, :1].reshape(x.shape[0], -1).copy()),
        "values": torch.from_numpy(values),
    }


def ml_dtypes_mx(x: Tensor, name: str, largest_exponent: int) -> Output:
    """Return OCP's floor rule, with exponents by numpy's frexp and elements by the casts of ml_dtypes."""
    ml_dtypes = import_module("ml_dtypes")
    dtype = getattr(ml_dtypes, name)
    blocks = x.numpy().reshape(x.shape[0], -1, 32)
    amax = np.abs(blocks).max(-1)
    exponent = np.where(amax == 0, -127, np.frexp(amax)[1] - 1 - largest_exponent).clip(-127, 127)
    limit = float(ml_dtypes.finfo(dtype).max)
    scaled = np.ldexp(blocks.astype(np.float64), -exponent[..., None]).astype(np.float32)
    elements = scaled.clip(-limit, limit).astype(dtype)
    values = np.ldexp(elements.astype(np.float64), exponent[..., None]).astype(np.float32)
    return {
        "scales": torch.from_numpy((exponent + 127).astype(np.uint8)),
        "values": torch.from_numpy(values.reshape(x.shape)),
    }


def gfloat_mx(x: Tensor, name: str) -> Output:
    gfloat, formats = import_module("gfloat"), import_module("gfloat.formats")
    info = getattr(formats, f"format_info_{name}")
    blocks = x.double().numpy().reshape(-1, 32)
    with np.errstate(divide="ignore"):
        scales = [gfloat.compute_scale_amax(info.etype.emax, block) for block in blocks]
        values = [gfloat.quantize_block(info, block, gfloat.compute_scale_amax) for block in blocks]
    codes = np.round(np.log2(np.array(scales))) + 127
    return {
        "scales": torch.from_numpy(codes.astype(np.uint8).reshape(x.shape[0], -1)),
        "values": torch.from_numpy(np.stack(values).astype(np.float32).reshape(x.shape)),
    }


# name of the dialect → (the package, its name for `version`, and the adapter)
ORACLES: dict[str, tuple[str, Callable[[Tensor], Output]]] = {
    "te-nvfp4": ("transformer-engine", te_nvfp4),
    "te-nvfp4-row": ("transformer-engine", partial(te_nvfp4, row_scaled_nvfp4=True)),
    **{
        f"te-4over6-{mode}-{top}": (
            "transformer-engine",
            partial(te_nvfp4, nvfp4_use_4over6=True, nvfp4_e4m3_max=top, nvfp4_4over6_err_mode=mode),
        )
        for mode in ("mae", "mse")
        for top in (448, 256)
    },
    "te-fp8-block": ("transformer-engine", te_fp8_block),
    "torchao-nvfp4": ("torchao", partial(torchao_nvfp4, two_levels=True)),
    "torchao-nvfp4-one-level": ("torchao", partial(torchao_nvfp4, two_levels=False)),
    **{
        f"torchao-mxfp{bits}-{rule}": ("torchao", partial(torchao_mx, dtype=dtype, rule=rule))
        for bits, dtype in ((8, torch.float8_e4m3fn), (4, torch.float4_e2m1fn_x2))
        for rule in ("floor", "ceil", "even", "rceil")
    },
    "modelopt-nvfp4": ("nvidia-modelopt", modelopt_nvfp4),
    "modelopt-mxfp4": ("nvidia-modelopt", partial(modelopt_mx, bits=4)),
    "modelopt-mxfp8": ("nvidia-modelopt", partial(modelopt_mx, bits=8)),
    "compressed-tensors-nvfp4": ("compressed-tensors", partial(compressed_tensors, block=16)),
    "compressed-tensors-mxfp4": ("compressed-tensors", partial(compressed_tensors, block=32)),
    "fouroversix-nvfp4-6": ("fouroversix", partial(fouroversix, data="nvfp4", rule="static_6")),
    "fouroversix-nvfp4-mae": ("fouroversix", partial(fouroversix, data="nvfp4", rule="mae")),
    "fouroversix-nvfp4-mse": ("fouroversix", partial(fouroversix, data="nvfp4", rule="mse")),
    "fouroversix-mxfp4": ("fouroversix", partial(fouroversix, data="mxfp4", rule="static_6")),
    "gguf-nvfp4": ("gguf", gguf_nvfp4),
    "gguf-mxfp4": ("gguf", gguf_mxfp4),
    "ocp-mxfp8": ("gfloat", partial(gfloat_mx, name="mxfp8_e4m3")),
    "ocp-mxfp4": ("gfloat", partial(gfloat_mx, name="mxfp4_e2m1")),
    "ocp-mxfp8-e5m2": ("ml_dtypes", partial(ml_dtypes_mx, name="float8_e5m2", largest_exponent=15)),
    "ocp-mxfp6-e3m2": ("ml_dtypes", partial(ml_dtypes_mx, name="float6_e3m2fn", largest_exponent=4)),
    "ocp-mxfp6-e2m3": ("ml_dtypes", partial(ml_dtypes_mx, name="float6_e2m3fn", largest_exponent=2)),
}

GOLDEN = Path(__file__).parents[1] / "golden" / "oracles.safetensors"
RECORDED = ("normal", "ties", "near ties", "scale ties", "heavy tails", "small blocks", "zero blocks", "signed zeros")
ROWS = 2  # of each case are recorded; the first column of each row has the tensor's amax


def installed(name: str) -> str | None:
    """Return the version of the package that runs a dialect, or None; fouroversix may be a folder without metadata."""
    package, _ = ORACLES[name]
    try:
        return version(package)
    except PackageNotFoundError:
        return "1.0.5" if package == "fouroversix" and importlib.util.find_spec(package) else None


def inputs(dialect: Dialect) -> dict[str, Tensor]:
    made = cases(dialect)
    return {name: made[name][:ROWS].contiguous() for name in RECORDED}


def record() -> None:
    """Run all installed packages and write their results, with versions, to the golden file."""
    tensors, versions = {}, {}
    if GOLDEN.exists():
        with safe_open(GOLDEN, "pt") as file:
            versions, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, (package, oracle) in ORACLES.items():
        if (found := installed(name)) is None:
            continue
        versions[name] = f"{package} {found}"
        family = f"{DIALECTS[name].format}:{DIALECTS[name].block((ROWS, 256))[1]}"
        for case, x in inputs(DIALECTS[name]).items():
            key = f"{family}:{tensor_digest(x)}"
            tensors[key] = x
            tensors |= {
                f"{name}/{case}/{quantity}/{key}": value.contiguous().view(torch.uint8)
                if value.element_size() == 1
                else value.contiguous()
                for quantity, value in oracle(x.clone()).items()
                if quantity != "values" or name.startswith("ocp-")
            }
    save_file(tensors, GOLDEN, versions)


def tensor_digest(x: Tensor) -> str:
    return hashlib.sha256(x.numpy().tobytes()).hexdigest()[:12]


if __name__ == "__main__":
    record()
