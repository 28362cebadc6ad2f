"""Provide the compiled CPU backend: the functions of protocol.py, computed by csrc/ and called through ctypes.

This module contains no arithmetic. It uses ctypes, because a call through a binding that accepts tensors costs more,
and because ctypes releases the interpreter lock while the library runs.
"""

import ctypes
import os
import threading
from functools import cache, lru_cache

import torch
from torch import Tensor

from fewbits.kernels.backends import build, reference
from fewbits.kernels.backends.compiled import Compiled, DecideCall, Job, pointer
from fewbits.kernels.backends.constants import SIGN_WORDS, flat, grid_of, inf_code, nan_code, scaling_of, sign_words
from fewbits.kernels.backends.protocol import DTYPES, Part, Stored
from fewbits.kernels.packing import operand_layout
from fewbits.kernels.quantizer import Quantizer, parts_of
from fewbits.kernels.reference.noise import NOISES, Noise
from fewbits.kernels.scalings import SELECTS, Select

SMALL = 1 << 15  # elements; for fewer, a second thread costs more than it saves
PRODUCTS_PER_ELEMENT = 64  # multiplications in a matrix product that take as long as an element in other kernels


# The structures of csrc/request.h


class _Quant(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 6),
        ("scaling", ctypes.c_uint32 * 15),
        *[(name, ctypes.c_int32) for name in ("stochastic", "group", "hadamard", "down")],
        ("signs", ctypes.c_uint32 * SIGN_WORDS),
        *[(name, ctypes.c_int64) for name in ("block_rows", "block_cols")],
        ("seed", ctypes.c_uint64),
    ]


class _Request(ctypes.Structure):
    _fields_ = [
        ("quant", _Quant),
        *[(name, ctypes.c_void_p) for name in ("out", "tally", "amax")],
        *[(name, ctypes.c_int64) for name in ("tally_rows", "tally_cols")],
        *[(name, ctypes.c_void_p) for name in ("skip", "codes", "scales", "group_scales")],
        *[(name, ctypes.c_uint32) for name in ("code_bits", "nan_code", "inf_code")],
        ("operand", ctypes.c_int32),
        *[(name, ctypes.c_int64) for name in ("line_stride", "block_stride")],
    ]


class _Stored(ctypes.Structure):
    _fields_ = [
        ("quant", _Quant),
        *[(name, ctypes.c_void_p) for name in ("codes", "scales", "groups")],
        *[(name, ctypes.c_uint32) for name in ("code_bits", "unused")],
    ]


@cache
def library() -> ctypes.CDLL:
    lib = build.load(build.build())
    pointer, size, whole, seed = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_uint64
    signatures = {
        "fb_quantize": [pointer, whole, size, size, pointer, whole, whole],
        "fb_decode": [pointer, whole, size, size, pointer, whole],
        "fb_extent": [pointer, whole, size, size, size, size, pointer, pointer, whole],
        "fb_compare": [pointer, whole, size, size, pointer, pointer, size, size, ctypes.c_uint32, pointer, whole],
        "fb_decide": [pointer, whole],
        "fb_gaussian_noise": [size, seed, pointer, whole],
        "fb_box_muller": [size, seed, pointer, whole],
        "fb_uniform_noise": [size, seed, pointer, whole],
        "fb_sample_weight": [pointer, whole, size, size, size, pointer, seed, whole, pointer, whole, whole],
        "fb_sample_weight_backward": [
            *[pointer, whole, pointer, whole, size, size, size, pointer, seed, whole, pointer, whole]
        ],
        "fb_matmul_order": [],
        "fb_matmul_fp32": [pointer, size, size, pointer, size, size, size, size, size, pointer, whole],
    }
    for entry, arguments in signatures.items():
        getattr(lib, entry).argtypes = arguments
    lib.fb_decide.restype = size
    return lib


class Cpu(Compiled):
    name = "cpu"
    never_waits = False
    rotate = staticmethod(reference.rotate)  # called rarely, so torch is fast enough

    def sample_weight(self, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(w.shape, dtype=dtype)
        library().fb_sample_weight(
            *(*_matrix(w), block, bits.data_ptr(), seed, NOISES.index(noise)),
            *(out.data_ptr(), DTYPES.index(dtype), threads(w.numel())),
        )
        return out

    def sample_weight_backward(
        self, grad: Tensor, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int
    ) -> Tensor:
        out = torch.empty_like(bits)
        library().fb_sample_weight_backward(
            *(grad.data_ptr(), DTYPES.index(grad.dtype), *_matrix(w), block, bits.data_ptr(), seed),
            *(NOISES.index(noise), out.data_ptr(), threads(w.numel())),
        )
        return out

    def matmul_fp32(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a · b, summed in FP32 in the order that arithmetic.md defines for this kind of processor."""
        (m, k), n = a.shape, b.shape[1]
        if 0 in (m, n, k):
            return a.new_zeros((m, n), dtype=torch.float32)
        a, b = (x if 1 in x.stride() else x.contiguous() for x in (a, b))
        out = a.new_empty((m, n), dtype=torch.float32)
        library().fb_matmul_fp32(
            *(a.data_ptr(), a.stride(0), a.stride(1), b.data_ptr(), b.stride(1), b.stride(0), m, n, k),
            *(out.data_ptr(), threads(m * n * k // PRODUCTS_PER_ELEMENT)),
        )
        return out

    def _run(self, x: Tensor, *jobs: Job) -> None:
        for job in jobs:
            job.set_statistics(x)
        requests = (_Request * len(jobs))(*(_request(x, job) for job in jobs))
        library().fb_quantize(*_matrix(x), requests, len(jobs), threads(x.numel()))

    def _decode(self, stored: Stored, q: Quantizer, axis: int, out: Tensor) -> None:
        request = _Stored(_quant(q, axis, *out.shape), *map(pointer, stored), q.format.bits)
        library().fb_decode(ctypes.byref(request), *_matrix(out)[1:], out.data_ptr(), threads(out.numel()))

    def _extent(self, x: Tensor, partition: Part, amax: Tensor, amin: Tensor) -> None:
        library().fb_extent(*_matrix(x), *partition, amax.data_ptr(), amin.data_ptr(), threads(x.numel()))

    def compare(self, source: Tensor, mine: Tensor, other: Tensor, partition: Part, by: Select) -> Tensor:
        worse = torch.empty(parts_of(source.shape, partition), dtype=torch.bool)
        if source.numel():
            library().fb_compare(
                *(*_matrix(source), mine.data_ptr(), other.data_ptr(), *partition, SELECTS.index(by) + 1),
                *(worse.data_ptr(), threads(source.numel())),
            )
        return worse

    def _decide(self, call: DecideCall, device: torch.device) -> bool:
        return bool(library().fb_decide(ctypes.byref(call), threads(call.blocks)))

    def _draw(self, noise: Noise, out: Tensor, seed: int) -> None:
        draw, each = (library().fb_gaussian_noise, 8) if noise == "gaussian" else (library().fb_uniform_noise, 1)
        draw(out.numel(), seed, out.data_ptr(), threads(each * out.numel()))


BACKEND = Cpu()


def box_muller(count: int, seed: int) -> Tensor:
    """Return round(z / 2) for standard normal numbers z, packed like the result of `gaussian_noise`.

    The benchmarks compare the speed of this function with that of `gaussian_noise`.
    """
    words = torch.empty((count + 7) // 8, dtype=torch.int32)
    library().fb_box_muller(words.numel(), seed, words.data_ptr(), threads(count))
    return words


def _request(x: Tensor, job: Job) -> _Request:
    request, f = _Request(quant=_quant(job.q, job.axis, *x.shape)), job.q.format
    request.quant.seed = job.seed
    request.out, request.tally, request.amax = pointer(job.out), pointer(job.counts), pointer(job.amax)
    request.tally_rows, request.tally_cols = job.partition or (0, 0)
    request.skip = pointer(job.skip)
    if job.stored:
        request.codes, scales, request.group_scales = map(pointer, job.stored)
        request.scales = scales if job.q.scaling != "none" else None
        request.code_bits, request.nan_code, request.inf_code = f.bits, nan_code(f), inf_code(f)
    if job.operand:
        places = operand_layout(job.q, job.axis, *x.shape)
        request.operand, request.line_stride, request.block_stride = 1, places.line_stride, places.block_stride
    return request


def _quant(q: Quantizer, axis: int, rows: int, cols: int) -> _Quant:
    return _Quant.from_buffer_copy(_template(q, axis, rows, cols))


@lru_cache(maxsize=1024)  # with signs=each every GEMM may have new signs
def _template(q: Quantizer, axis: int, rows: int, cols: int) -> _Quant:
    block_rows, block_cols = q.block.resolve((rows, cols), axis)
    return _Quant(
        grid=grid_of(q.format, q.overflow),
        scaling=flat(scaling_of(q)),
        stochastic=q.rounding == "stochastic",
        group=q.group_blocks,
        hadamard=q.hadamard or 0,
        down=axis == 0,
        signs=sign_words(q),
        block_rows=min(block_rows, max(rows, 1)),
        block_cols=min(block_cols, max(cols, 1)),
    )


def _matrix(x: Tensor) -> tuple[int, int, int, int]:
    """Return the arguments that describe a matrix to a C++ function: address, index in DTYPES, rows and columns."""
    return x.data_ptr(), DTYPES.index(x.dtype), x.shape[0], x.shape[1]


def threads(elements: int) -> int:
    """Return how many threads to use for this many elements.

    The result is 1 for few elements or in a forked process, and otherwise torch's number of threads.
    """
    return 1 if elements < SMALL or _forked.is_set() else torch.get_num_threads()


# OpenMP's threads do not survive a fork. A child process that used them would wait forever, so it uses one thread.
_forked = threading.Event()
os.register_at_fork(after_in_child=_forked.set)
