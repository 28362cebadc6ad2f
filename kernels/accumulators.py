"""Multiply matrices on any device, and round the sums as hardware does whose accumulators keep few bits.

    product(a, b, "hopper-fp8")      a [M, K] · b [K, N], in float32, summed as in Hopper's FP8 tensor cores

The table `ACCUMULATORS` has a row for each accumulator; arithmetic.md ("Accumulators") defines the arithmetic. The
constants of the tensor cores were measured on devices by the authors of MMA-Sim (arXiv 2511.10909).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final, Literal

import torch
from torch import Tensor

from fewbits.kernels.backends import cpu
from fewbits.kernels.formats import TABLE
from fewbits.kernels.layers.library import is_compiled
from fewbits.kernels.reference import accumulators as reference

Kind = Literal["format", "fused", "grouped", "integer"]


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A rule for computing a sum of K products. The field `kind` has one of four values.

    format: one product after the other is added, and each sum is rounded to nearest in the format `kept`.
    fused: `length` products and the sum so far are aligned to one exponent, truncated, and added at once.
    grouped: like fused, but each term is the exact sum of 16 products (a group), times the scales that the two operands
        have for the group.
    integer: products of integers are added in 32 bits, exactly; the sum is then multiplied by the operands' scales.
    """

    name: str
    about: str
    kind: Kind
    kept: str = "fp32"  # the format of the sum; fused, grouped: fp32 or e8mY, to which each new sum is truncated
    length: int = 1  # the number of products that are added at once
    fraction: int = 0  # the number of bits after the binary point that an aligned product keeps
    promote: int = 0  # the number of products after which the sum is moved to a separate float32 sum; 0: never

    @property
    def kept_bits(self) -> int:
        """The number of fraction bits of the sum."""
        return TABLE["fp32"].mantissa_bits if self.kept == "fp32" else int(self.kept.partition("m")[2])


# fmt: off
_ROWS = (
    Accumulator("fp32", "FP32, one product after the other", "format", "fp32"),
    Accumulator("fp16", "FP16, one product after the other", "format", "fp16"),
    Accumulator("bf16", "BF16, one product after the other", "format", "bf16"),
    Accumulator("hopper-fp8", "FP8 tensor cores of Hopper", "fused", "e8m13", 32, 13),
    Accumulator("hopper-fp8-promoted", "hopper-fp8, added in FP32 every 128", "fused", "e8m13", 32, 13, 128),
    Accumulator("hopper-bf16", "BF16 and FP16 tensor cores of Hopper", "fused", "fp32", 16, 25),
    Accumulator("blackwell-fp8", "FP8 and MXFP8 tensor cores of Blackwell", "fused", "fp32", 32, 25),
    Accumulator("blackwell-fp4", "MXFP4 and NVFP4 tensor cores of Blackwell", "grouped", "fp32", 64, 35),
    Accumulator("int32", "INT8 tensor cores: integers, summed in 32 bits", "integer", "int32"),
)
# fmt: on
ACCUMULATORS: Final[Mapping[str, Accumulator]] = MappingProxyType({row.name: row for row in _ROWS})
GROUP: Final = 16  # products in a group of a `grouped` accumulator
SUM_FORMATS = ("fp32", "fp16", "bf16")  # in the order of SumFormat in csrc/accumulate.h

# Subnormals are aligned by the exponent of the smallest normal value of their format.
_EMIN = {
    torch.float8_e4m3fn: TABLE["e4m3"].emin,
    torch.float8_e5m2: TABLE["e5m2"].emin,
    torch.float16: TABLE["fp16"].emin,
    torch.bfloat16: TABLE["bf16"].emin,
}
_SCALE_EMIN = {torch.float8_e4m3fn: TABLE["e4m3"].emin, torch.float8_e8m0fnu: TABLE["e8m0"].emin}
_E2M1 = tuple(sorted(set(TABLE["e2m1"].values())))


def product(a: Tensor, b: Tensor, accumulator: str, *, scales: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return a [M, K] · b [K, N] in float32, summed by the row of `ACCUMULATORS` with the name `accumulator`.

    Valid dtypes of a and b are float8_e4m3fn, float8_e5m2, float16 and bfloat16, and also float32 if the accumulator is
    `fp32`, `fp16` or `bf16`. For `blackwell-fp4`, a and b may have any dtype, but must contain only values of E2M1.

    `int32` takes int8.

    scales: None: all scales are 1. For `blackwell-fp4`, a tensor [M, K / B] with the block scales of a, and a tensor
        [K / B, N] with those of b, in float8_e4m3fn or float8_e8m0fnu, for blocks of B = 16 or 32 elements along K. For
        `int32`, float32 tensors that multiply the sums: [M, 1] or [] for a, [1, N] or [] for b.

    In FP16 a sum of ones stops at 2048, because 2049 is not a value of FP16:

    >>> product(torch.ones(1, 4096, dtype=torch.float16), torch.ones(4096, 1, dtype=torch.float16), "fp16")
    tensor([[2048.]])
    """
    chosen = ACCUMULATORS.get(accumulator)
    if chosen is None:
        raise ValueError(f"unknown accumulator {accumulator!r}: valid names are {', '.join(ACCUMULATORS)}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"cannot multiply shapes {list(a.shape)} and {list(b.shape)}: valid shapes are [M, K] and [K, N]"
        )
    if a.device != b.device:
        raise ValueError(f"cannot multiply operands on {a.device} and {b.device}: both must be on one device")
    if chosen.kind == "grouped":
        return _grouped(a, b, chosen, scales)
    if chosen.kind == "integer":
        return _integer(a, b, scales)
    if scales is not None:
        raise ValueError(f"accumulator {accumulator} takes no scales: remove scales=, or use blackwell-fp4 or int32")
    valid = (*_EMIN, torch.float32) if chosen.kind == "format" else tuple(_EMIN)
    for operand in (a, b):
        if operand.dtype not in valid:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in valid)
            raise ValueError(f"accumulator {accumulator} does not take dtype {operand.dtype}: valid dtypes are {names}")
    left, right = a.detach().float().contiguous(), b.detach().float().contiguous()
    if chosen.kind == "format":
        if not _is_compiled_for(a):
            return reference.sum_in_format(left, right, TABLE[chosen.kept])
        return _run("fb_accumulate_in_format", left, right, (), SUM_FORMATS.index(chosen.kept))
    emin = _EMIN[a.dtype], _EMIN[b.dtype]
    if not _is_compiled_for(a):
        how = chosen.length, chosen.fraction, chosen.kept_bits, chosen.promote
        return reference.fused_sum(left, right, emin, *how)
    return _run("fb_accumulate", left, right, emin, _how(chosen))


def _integer(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return (a · b) · (scale of a) · (scale of b) for int8 operands; a sum beyond 32 bits wraps, as in hardware."""
    if a.dtype != torch.int8 or b.dtype != torch.int8:
        raise ValueError(f"accumulator int32 takes operands in int8, not {a.dtype} and {b.dtype}")
    sums = (a.double() @ b.double()).long().int().float()  # float64 holds these sums exactly
    if scales is not None and not (len(scales) == 2 and all(isinstance(scale, Tensor) for scale in scales)):
        raise ValueError("scales: two tensors are expected, one for each operand")
    for axis, scale in enumerate(scales or ()):
        if scale.dtype != torch.float32:
            raise ValueError(f"a scale of dtype {scale.dtype} does not fit: float32 is expected")
        if scale.shape not in (torch.Size(()), torch.Size((len(a), 1) if axis == 0 else (1, b.shape[1]))):
            raise ValueError(
                f"a scale of shape {list(scale.shape)} does not fit: valid shapes are [], and [{len(a)}, 1] for the "
                f"first operand or [1, {b.shape[1]}] for the second"
            )
        sums = sums * scale
    return sums


def _grouped(a: Tensor, b: Tensor, chosen: Accumulator, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    left, right = a.detach().float(), b.detach().float()
    grid = torch.tensor(_E2M1, device=a.device)
    for operand in (left, right):
        if not torch.isin(operand, grid).all():
            raise ValueError(
                f"accumulator {chosen.name}: an operand has values that E2M1 does not have: valid values are 0, ±0.5, "
                "±1, ±1.5, ±2, ±3, ±4 and ±6; pass block scales separately, as scales="
            )
    k = a.shape[1]
    groups = -(-k // GROUP)
    if scales is None:
        ones = torch.ones((), dtype=torch.float8_e8m0fnu, device=a.device)
        scales = ones.expand(a.shape[0], groups), ones.expand(groups, b.shape[1])
    emin = _SCALE_EMIN.get(scales[0].dtype), _SCALE_EMIN.get(scales[1].dtype)
    if emin[0] is None or emin[1] is None:
        raise ValueError(
            f"the scales have dtypes {scales[0].dtype} and {scales[1].dtype}: valid for each are float8_e4m3fn and "
            "float8_e8m0fnu"
        )
    left_scales = _of_groups(scales[0].float(), 1, (a.shape[0], k))
    right_scales = _of_groups(scales[1].float(), 0, (b.shape[1], k))
    padding = groups * GROUP - k
    left = torch.nn.functional.pad(left, (0, padding))
    right = torch.nn.functional.pad(right, (0, 0, 0, padding))
    exponents = emin[0], emin[1]
    if not _is_compiled_for(a):
        how = chosen.length // GROUP, chosen.fraction, chosen.kept_bits
        return reference.grouped_sum(left, right, left_scales, right_scales, exponents, *how)
    m, n = left.shape[0], right.shape[1]
    out = left.new_empty(m, n)
    _library().fb_accumulate_groups(
        *(left.data_ptr(), left_scales.data_ptr(), emin[0], right.data_ptr(), right_scales.data_ptr(), emin[1]),
        *(m, n, groups * GROUP, GROUP, ctypes.byref(_how(chosen)), out.data_ptr(), _threads(left, right)),
    )
    return out


def _of_groups(scales: Tensor, axis: int, shape: tuple[int, int]) -> Tensor:
    """Return the magnitudes of an operand's scales, one for every group of 16 values along K, laid out like `scales`.

    scales: one scale for every 16 or 32 values along K. axis: the dimension of `scales` that lies along K. shape: the
    number of vectors of the operand (rows of a, columns of b), and K.
    """
    lines, k = shape
    groups = -(-k // GROUP)
    for per_scale in (1, 2):
        blocks = -(-groups // per_scale)
        if scales.shape == ((lines, blocks) if axis else (blocks, lines)):
            return scales.abs().repeat_interleave(per_scale, axis).narrow(axis, 0, groups).contiguous()
    raise ValueError(
        f"scales of shape {list(scales.shape)} do not fit the {lines} {'rows of a' if axis else 'columns of b'}: each "
        f"needs one scale for every 16 or 32 of its {k} values"
    )


class _Fused(ctypes.Structure):  # csrc/accumulate.h
    _fields_ = [(name, ctypes.c_int32) for name in ("length", "fraction", "kept", "promote")]


def _how(chosen: Accumulator) -> _Fused:
    return _Fused(chosen.length, chosen.fraction, chosen.kept_bits, chosen.promote)


def _is_compiled_for(x: Tensor) -> bool:
    return x.device.type == "cpu" and is_compiled()


def _run(entry: str, a: Tensor, b: Tensor, emin: tuple[int, int] | tuple[()], how: _Fused | int) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty(m, n)
    operands = (a.data_ptr(), *emin[:1], b.data_ptr(), *emin[1:])
    described = how if isinstance(how, int) else ctypes.byref(how)
    getattr(_library(), entry)(*operands, m, n, k, described, out.data_ptr(), _threads(a, b))
    return out


def _threads(a: Tensor, b: Tensor) -> int:
    return cpu.threads(a.numel() * b.shape[1])


@cache
def _library() -> ctypes.CDLL:
    lib = cpu.library()
    pointer, size, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    shape = [size, size, size]
    signatures = {
        "fb_accumulate": [pointer, whole, pointer, whole, *shape, pointer, pointer, whole],
        "fb_accumulate_in_format": [pointer, pointer, *shape, whole, pointer, whole],
        "fb_accumulate_groups": [*[pointer, pointer, whole] * 2, *shape, whole, pointer, pointer, whole],
    }
    for name, arguments in signatures.items():
        getattr(lib, name).argtypes = arguments
        getattr(lib, name).restype = None
    return lib
