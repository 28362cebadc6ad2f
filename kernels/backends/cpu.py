"""Provide the compiled CPU backend: the functions of reference.py, computed by csrc/ and called through ctypes.

No arithmetic happens here. ctypes costs less per call than a binding that knows tensors, and it releases the
interpreter lock while the library runs.
"""

import ctypes
import os
import threading
from functools import cache, lru_cache

import torch
from torch import Tensor

from fewbits.kernels.backends import build, reference
from fewbits.kernels.packing import allocate
from fewbits.kernels.quantizer import Quantizer

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
SCALINGS = {"none": 0, "amax": 1, "gam": 2, "e8m0": 3, "mx": 4, "nvfp4": 5, "ue5m3": 6, "fouroversix": 7, "eden": 8}
NOISES = {"gaussian": 0, "uniform": 1}
COUNTS = 7
SMALL = 1 << 15  # with fewer elements a second thread costs more than it saves
PRODUCTS_PER_ELEMENT = 64  # multiplications of a matrix product that take as long as one element of other kernels


class _Grid(ctypes.Structure):  # csrc/numeric.h
    _fields_ = [
        ("min_exponent", ctypes.c_uint32),
        ("dropped", ctypes.c_uint32),
        ("max", ctypes.c_float),
        ("overflow", ctypes.c_float),
        ("wide", ctypes.c_uint32),
        ("inf", ctypes.c_uint32),
    ]


class _Quant(ctypes.Structure):  # csrc/request.h
    _fields_ = [
        ("grid", _Grid),
        ("scaling", ctypes.c_int32),
        ("stochastic", ctypes.c_int32),
        ("group_by_row", ctypes.c_int32),
        ("hadamard", ctypes.c_int32),
        ("down", ctypes.c_int32),
        ("signs", ctypes.c_uint32 * 4),
        ("block_rows", ctypes.c_int64),
        ("block_cols", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
    ]


class _Request(ctypes.Structure):  # csrc/request.h
    _fields_ = [
        ("quant", _Quant),
        ("out", ctypes.c_void_p),
        ("tally", ctypes.c_void_p),
        ("amax", ctypes.c_void_p),
        ("tally_rows", ctypes.c_int64),
        ("tally_cols", ctypes.c_int64),
        ("skip", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("group_scales", ctypes.c_void_p),
        ("code_bits", ctypes.c_uint32),
        ("nan_code", ctypes.c_uint32),
        ("inf_code", ctypes.c_uint32),
    ]


class _Stored(ctypes.Structure):  # csrc/request.h
    _fields_ = [
        ("quant", _Quant),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("code_bits", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    ]


@cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build.build()))
    pointer, size, whole, seed = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint64
    signatures = {
        "fb_quantize": [pointer, whole, size, size, pointer, whole, whole],
        "fb_decode": [pointer, whole, size, size, pointer, whole],
        "fb_extent": [pointer, whole, size, size, size, size, pointer, pointer, whole],
        "fb_gaussian_noise": [size, seed, pointer, whole],
        "fb_box_muller": [size, seed, pointer, whole],
        "fb_uniform_noise": [size, seed, pointer, whole],
        "fb_sample_weight": [pointer, whole, size, size, size, pointer, seed, whole, pointer, whole, whole],
        "fb_sample_weight_backward": [
            *[pointer, whole, pointer, whole, size, size, size, pointer, seed, whole, pointer, whole]
        ],
    }
    for name, arguments in signatures.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, None
    lib.fb_matmul_fp32.argtypes = [pointer, size, size, pointer, size, size, size, size, size, pointer, whole]
    return lib


def quantize(
    x: Tensor,
    q: Quantizer,
    axis: int,
    seed: int,
    *,
    out: Tensor | None = None,
    want_values: bool = True,
    want_stats: bool = False,
    partition: tuple[int, int] | None = None,
    skip: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if out is None and want_values:
        out = torch.empty_like(x)
    request, counts, amax = _request(x, q, axis, seed, out, want_stats, partition)
    if skip is not None:
        request.skip = skip.data_ptr()
    _run(x, (request,))
    return out, counts, amax


def quantize_both(
    x: Tensor, row: Quantizer, column: Quantizer, row_seed: int, column_seed: int
) -> tuple[Tensor, Tensor]:
    along, down = torch.empty_like(x), torch.empty_like(x)
    requests = (
        _request(x, row, -1, row_seed, along, False, None)[0],
        _request(x, column, 0, column_seed, down, False, None)[0],
    )
    _run(x, requests)
    return along, down


def encode(x: Tensor, q: Quantizer, axis: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    request, _, _ = _request(x, q, axis, seed, None, False, None)
    (codes, scales, group_scales), f = allocate(q, axis, x), q.format
    request.codes, request.group_scales = codes.data_ptr(), group_scales.data_ptr()
    request.scales = scales.data_ptr() if q.scaling != "none" else None
    request.code_bits = f.bits
    request.nan_code = f.code_of(float("nan")) if f.has_nan else 0
    request.inf_code = f.code_of(float("inf"), "inf") if f.has_inf else 0
    _run(x, (request,))
    return codes, scales, group_scales


def decode(
    codes: Tensor, scales: Tensor, groups: Tensor, q: Quantizer, axis: int, cols: int, dtype: torch.dtype
) -> Tensor:
    values = torch.empty((codes.shape[0], cols), dtype=dtype)
    if values.numel():
        stored = _Stored(_quant(q, axis, *values.shape), codes.data_ptr(), scales.data_ptr(), groups.data_ptr())
        stored.code_bits = q.format.bits
        library().fb_decode(
            ctypes.byref(stored), DTYPES[dtype], *values.shape, values.data_ptr(), _threads(values.numel())
        )
    return values


def extent(x: Tensor, partition: tuple[int, int]) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape
    grid = _grid(rows, cols, *partition)
    amax, amin = torch.zeros(grid), torch.full(grid, float("inf"))
    if x.numel():
        library().fb_extent(
            x.data_ptr(), DTYPES[x.dtype], rows, cols, *partition, amax.data_ptr(), amin.data_ptr(), _threads(x.numel())
        )
    return amax, amin


def gaussian_noise(count: int, seed: int, device: torch.device) -> Tensor:
    words = torch.empty((count + 7) // 8, dtype=torch.int32, device=device)
    library().fb_gaussian_noise(words.numel(), seed, words.data_ptr(), _threads(count))
    return words


def box_muller(count: int, seed: int) -> Tensor:
    """Return round(z / 2), packed like `gaussian_noise`: the baseline generator of the paper, for the benchmark."""
    words = torch.empty((count + 7) // 8, dtype=torch.int32)
    library().fb_box_muller(words.numel(), seed, words.data_ptr(), _threads(count))
    return words


def uniform_noise(count: int, seed: int, device: torch.device) -> Tensor:
    noise = torch.empty(count, dtype=torch.bfloat16, device=device)
    library().fb_uniform_noise(count, seed, noise.data_ptr(), _threads(count))
    return noise


def sample_weight(w: Tensor, bits: Tensor, seed: int, noise: str, block: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(w.shape, dtype=dtype)
    library().fb_sample_weight(
        *(w.data_ptr(), DTYPES[w.dtype], *w.shape, block, bits.data_ptr(), seed, NOISES[noise]),
        *(out.data_ptr(), DTYPES[dtype], _threads(w.numel())),
    )
    return out


def sample_weight_backward(grad: Tensor, w: Tensor, bits: Tensor, seed: int, noise: str, block: int) -> Tensor:
    out = torch.empty_like(bits)
    library().fb_sample_weight_backward(
        *(grad.data_ptr(), DTYPES[grad.dtype], w.data_ptr(), DTYPES[w.dtype], *w.shape, block, bits.data_ptr()),
        *(seed, NOISES[noise], out.data_ptr(), _threads(w.numel())),
    )
    return out


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b summed in FP32; without AVX-512 this is torch's product of the widened operands."""
    (m, k), n = a.shape, b.shape[1]
    if 0 in (m, n, k):
        return a.new_zeros((m, n), dtype=torch.float32)
    a, b = (x if 1 in x.stride() else x.contiguous() for x in (a, b))
    out = a.new_empty((m, n), dtype=torch.float32)
    supported = library().fb_matmul_fp32(
        *(a.data_ptr(), a.stride(0), a.stride(1), b.data_ptr(), b.stride(1), b.stride(0), m, n, k),
        *(out.data_ptr(), _threads(m * n * k // PRODUCTS_PER_ELEMENT)),
    )
    return out if supported else reference.matmul_fp32(a, b)


# These are small or rare enough to use torch.
rotate = reference.rotate
unpack_noise = reference.unpack_noise


def _request(
    x: Tensor,
    q: Quantizer,
    axis: int,
    seed: int,
    out: Tensor | None,
    want_stats: bool,
    partition: tuple[int, int] | None,
) -> tuple[_Request, Tensor | None, Tensor | None]:
    rows, cols = x.shape
    request = _Request(quant=_quant(q, axis, rows, cols))
    request.quant.seed = seed
    request.out = out.data_ptr() if out is not None else None
    request.tally_rows, request.tally_cols = partition or (max(rows, 1), max(cols, 1))
    if not want_stats:
        return request, None, None
    grid = _grid(rows, cols, request.tally_rows, request.tally_cols)
    counts, amax = torch.zeros(*grid, COUNTS, dtype=torch.int64), torch.zeros(grid)
    request.tally, request.amax = counts.data_ptr(), amax.data_ptr()
    return request, counts, amax


def _quant(q: Quantizer, axis: int, rows: int, cols: int) -> _Quant:
    quant = _Quant.from_buffer_copy(_template(q, axis))
    r, c = q.block.resolve(rows, cols, axis)
    quant.block_rows, quant.block_cols = min(r, max(rows, 1)), min(c, max(cols, 1))
    return quant


@lru_cache(maxsize=1024)  # with signs=each every GEMM may have new signs
def _template(q: Quantizer, axis: int) -> _Quant:
    f = q.format
    overflow = {"saturate": f.max, "nan": float("nan"), "inf": float("inf")}[q.overflow]
    grid = _Grid(f.emin + 127 << 23, 23 - f.mantissa_bits, f.max, overflow, f.exponent_bits == 8, f.has_inf)
    signs = reference.hadamard_signs(q, torch.device("cpu")).tolist() if q.hadamard else []
    negative = sum(1 << i for i, sign in enumerate(signs) if sign < 0)
    words = (ctypes.c_uint32 * 4)(*(negative >> 32 * k & 0xFFFFFFFF for k in range(4)))
    return _Quant(
        grid=grid,
        scaling=SCALINGS[q.scaling],
        stochastic=q.rounding == "stochastic",
        group_by_row=q.group == "row",
        hadamard=q.hadamard or 0,
        down=axis == 0,
        signs=words,
    )


def _run(x: Tensor, requests: tuple[_Request, ...]) -> None:
    rows, cols = x.shape
    array = (_Request * len(requests))(*requests)
    library().fb_quantize(x.data_ptr(), DTYPES[x.dtype], rows, cols, array, len(requests), _threads(x.numel()))


def _threads(elements: int) -> int:
    return 1 if elements < SMALL or _forked.is_set() else torch.get_num_threads()


# OpenMP's threads do not survive a fork, and a child that asks for them waits forever, so it uses one thread.
_forked = threading.Event()
os.register_at_fork(after_in_child=_forked.set)


def _grid(rows: int, cols: int, r: int, c: int) -> tuple[int, int]:
    return -(-rows // r), -(-cols // c)
