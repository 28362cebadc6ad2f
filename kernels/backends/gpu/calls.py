"""Define the arguments of the CUDA kernels as copies of the structures in csrc/*.cu and csrc/spec.cuh."""

import ctypes

from torch import Tensor

from fewbits.kernels.backends.constants import SIGN_WORDS
from fewbits.kernels.backends.gpu.tiles import Parts, power_of_two_factor
from fewbits.kernels.backends.protocol import OBSERVED_AT_ONCE
from fewbits.kernels.quantizer import Quantizer


class Packed(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_void_p), ("row_bytes", ctypes.c_uint32), ("aligned", ctypes.c_uint32)]


class Request(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("out", "tally", "part_amax", "skip")],
        ("codes", Packed),
        *[(name, ctypes.c_void_p) for name in ("scales", "group_scales", "block_amax", "group_amax", "four_less_six")],
        ("seed", ctypes.c_uint64),
        *[(name, ctypes.c_void_p) for name in ("seed_offset", "sign_changes")],
        ("signs", ctypes.c_uint32 * SIGN_WORDS),
        ("parts", Parts),
        ("blocks", Parts),
        ("nan_code", ctypes.c_uint32),
        ("inf_code", ctypes.c_uint32),
        ("line_stride", ctypes.c_int32),
        ("block_stride", ctypes.c_int32),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *[(name, ctypes.c_int32) for name in ("rows", "cols", "backwards", "aligned", "kept", "unused")],
        ("requests", Request * 2),
    ]


class Observation(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("counts", "choice")],
        *[(name, ctypes.c_int64) for name in ("blocks", "row")],
    ]


class ObserveCall(ctypes.Structure):
    _fields_ = [("table", ctypes.c_void_p), ("observations", Observation * OBSERVED_AT_ONCE)]


class DecodeCall(ctypes.Structure):
    _fields_ = [
        ("codes", Packed),
        *[(name, ctypes.c_void_p) for name in ("scales", "groups", "out")],
        *[(name, ctypes.c_int32) for name in ("rows", "cols", "across", "aligned")],
    ]


class WeightCall(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("w", "grad", "bits", "noise", "out")],
        ("count", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("seed_offset", ctypes.c_void_p),
        *[(name, ctypes.c_int32) for name in ("rows", "cols", "block", "uniform", "aligned", "unused")],
    ]


def packed_at(codes: Tensor, q: Quantizer) -> Packed:
    """Return the structure that describes packed codes to a kernel.

    Eight codes of b bits fill b bytes. The field `aligned` tells whether every such group of b bytes starts at an
    address that is a multiple of the largest power of two that divides b.
    """
    word = power_of_two_factor(q.format.stored_bits)
    return Packed(codes.data_ptr(), codes.shape[1], codes.data_ptr() % word == 0 and codes.shape[1] % word == 0)


def aligned(*tensors: Tensor) -> bool:
    return all(t.data_ptr() % 16 == 0 and t.shape[1] * t.itemsize % 16 == 0 for t in tensors)
