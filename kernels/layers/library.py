"""Select what computes layers: the compiled CPU library, the CUDA kernels, or the reference in plain torch.

The compiled functions take BF16 and float32 tensors. The modules in kernels/reference/ define the results.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from fewbits.kernels.backends import cpu
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.backends.gpu.layers import Layers

DTYPES = (torch.bfloat16, torch.float32)  # the index is the argument "is float" of the C++ functions

_POINTER, _SIZE, _WHOLE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "fb_attention": [_POINTER],
    "fb_attention_backward": [_POINTER],
    "fb_gelu": [_WHOLE, _SIZE, *[_POINTER] * 2, _WHOLE],
    "fb_gelu_backward": [_WHOLE, _SIZE, *[_POINTER] * 3, _WHOLE],
    "fb_norm": [_POINTER, _WHOLE, _WHOLE, *[_POINTER] * 6],
    "fb_norm_backward": [_POINTER, _WHOLE, _WHOLE, *[_POINTER] * 8],
    "fb_entropy": [_WHOLE, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _POINTER, _WHOLE],
    "fb_entropy_backward": [_WHOLE, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, *[_POINTER] * 3, _WHOLE],
    "fb_squared_relu": [_WHOLE, _SIZE, *[_POINTER] * 2, _WHOLE],
    "fb_squared_relu_backward": [_WHOLE, _SIZE, *[_POINTER] * 3, _WHOLE],
    "fb_swiglu": [_WHOLE, _SIZE, *[_POINTER] * 3, _WHOLE],
    "fb_swiglu_backward": [_WHOLE, _SIZE, *[_POINTER] * 5, _WHOLE],
}


def is_compiled(device: str = "cpu") -> bool:
    """Tell whether layers on this kind of device use the CPU's compiled library."""
    return backend_for(device).name == "cpu"


def gpu_layers(x: Tensor) -> Layers | None:
    """Return the CUDA kernels of layers for this tensor, or None if x is on a CPU or the kernels do not work here."""
    layers: Layers | None = getattr(backend_for(x.device.type), "layers", None)
    return layers


@cache
def library() -> ctypes.CDLL:
    lib = cpu.library()
    for name, arguments in _SIGNATURES.items():
        getattr(lib, name).argtypes = arguments
        getattr(lib, name).restype = None
    return lib


def takes(*tensors: Tensor) -> bool:
    """Tell whether our operators for layers accept all these tensors: BF16 or float32, on a CPU, a GPU or torch's meta.

    For other tensors, the layers use torch's functions.
    """
    return all(x.device.type in ("cpu", "cuda", "meta") and x.dtype in DTYPES for x in tensors)


def is_float(x: Tensor) -> int:
    return DTYPES.index(x.dtype)


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
