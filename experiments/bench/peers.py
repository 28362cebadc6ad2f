"""Implement the benchmark's cases with other libraries: torch, torch.compile, torchao and ml_dtypes.

A peer is another implementation. For a case it returns a function of the tensor, which returns new tensors in the dtype
of x, or None if it does not implement the case.

"torch eager" and "torch.compile" are casts, quantizers with FP32 scales, NVFP4 and samplers as users without custom
kernels would write them: vectorised, in float32, with casts to torch's float8 dtypes where torch has the format, and
with torch's random numbers. So they never do more work than our kernels.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.experiments.bench.kernel_cases import BITS, SQUARE, Case, Work
from fewbits.kernels.quantizer import Quantizer


@dataclass(frozen=True)
class Peer:
    """Another implementation to compare with.

    package: the module that must be importable.
    work: returns the peer's function for a case, or None if the peer does not implement the case.
    slow: True if, on a CPU, the peer is timed on fewer rows when all rows would take too long.
    """

    name: str
    package: str
    work: Callable[[Case], Work | None]
    slow: bool = True
    cpu_only: bool = False

    def missing(self, device: str) -> str | None:
        """Return the reason why the peer cannot be measured on this kind of device, or None if it can."""
        if self.cpu_only and device != "cpu":
            return "it runs only on CPUs"
        return None if find_spec(self.package) else "it is not installed"

    @property
    def version(self) -> str:
        return metadata.version(self.package)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torchao's warnings about missing GPU libraries and torch.compile's warnings about graph breaks."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"


# ------------------------------------------------------------------------------------------------ plain torch

EXPONENT = 0x7F800000
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _round(v: Tensor, q: Quantizer) -> Tensor:
    f = q.format
    if f.name in TORCH_DTYPES:
        return v.clamp(-f.max, f.max).to(TORCH_DTYPES[f.name]).float()
    step = (v.view(torch.int32) & EXPONENT).view(torch.float32).clamp(min=2.0**f.emin) * 2.0**-f.mantissa_bits
    return ((v / step).round() * step).clamp(-f.max, f.max)


def fake_quantize(x: Tensor, q: Quantizer, axis: int) -> Tensor:
    """Return x in blocks with FP32 scales or NVFP4's, or cast without scales."""
    if q.scaling == "none":
        return _round(x.float(), q).to(x.dtype)
    rows, cols = x.shape
    r, c = q.block.resolve((rows, cols), axis)
    v = x.float().view(rows // r, r, cols // c, c)
    amax = v.abs().amax((1, 3), keepdim=True)
    encode = q.format.max / amax
    decode = 1 / encode
    if q.scaling == "nvfp4":
        g = q.format.max * 448 / amax.amax()
        s8 = (amax * (g / q.format.max)).clamp(max=448).to(torch.float8_e4m3fn).float()
        encode, decode = g / s8, s8 / g
    return (_round(v * encode, q) * decode).view(x.shape).to(x.dtype)


def sample(w: Tensor, draw: Callable[[Tensor], Tensor], bits: float, square: int) -> Tensor:
    """Return the weights sampled by GaussWS eq. 3, with the same bit width `bits` for all squares of w.

    draw: a function that returns noise in the shape of its argument. square: the rows, and the columns, of a square.
    """
    squares = w.float().unflatten(0, (-1, square)).unflatten(2, (-1, square))
    scale = squares.abs().amax((1, 3), keepdim=True) * 2.0 ** (1 - bits)
    return (squares + draw(squares) * scale).view(w.shape).to(w.dtype)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda like: (torch.randn_like(like) / 2).round(),
    "uniform": lambda like: torch.rand_like(like) - 0.5,
}


def eager(case: Case) -> Work | None:
    if case.sampler:
        return partial(sample, draw=DRAWS[case.sampler], bits=BITS, square=SQUARE)
    q = case.quantizer
    if q is None or len(case.axes) > 1 or case.stats or q.hadamard or q.needs_seed or _has_options(q):
        return None
    return partial(fake_quantize, q=q, axis=case.axes[0]) if q.scaling in ("none", "amax", "nvfp4") else None


def _has_options(q: Quantizer) -> bool:
    """Tell whether a scaling has options that peers lack."""
    return (q.group, q.factor, q.target, q.select) != ("tensor", 1.0, None, None)


def compiled(case: Case) -> Work | None:
    torch.compiler.reset()  # every case is compiled separately
    work = eager(case)
    return work and torch.compile(work, dynamic=False)


# ------------------------------------------------------------------------------------------------ torchao, ml_dtypes


def torchao(case: Case) -> Work | None:
    q = case.quantizer
    if q is None or case.axes != (-1,) or case.stats or q.hadamard or q.needs_seed or _has_options(q):
        return None
    if q.scaling in ("e8m0", "mx") and str(q.block) == "1x32":
        mx: Any = import_module("torchao.prototype.mx_formats.mx_tensor")
        modes: Any = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
        element = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2, "e2m3": mx.DTYPE_FP6_E2M3}.get(
            q.format.name
        )
        mode = modes.FLOOR if q.scaling == "mx" else modes.RCEIL
        return lambda x: mx.MXTensor.to_mx(x, element, 32, mode).dequantize()
    if q.scaling == "nvfp4" and str(q.block) == "1x16":
        nv: Any = import_module("torchao.prototype.mx_formats.nvfp4_tensor")

        def nvfp4(x: Tensor) -> object:
            scale = nv.per_tensor_amax_to_scale(x.abs().amax())
            return nv.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize()

        return nvfp4
    return None


def ml_dtypes(case: Case) -> Work | None:
    if case.quantizer != Quantizer("e4m3"):
        return None
    types: Any = import_module("ml_dtypes")

    def cast(x: Tensor) -> object:
        if x.dtype == torch.bfloat16:
            array = x.view(torch.uint16).numpy().view(types.bfloat16)
            rounded = array.astype(types.float8_e4m3fn).astype(types.bfloat16)
            return torch.from_numpy(rounded.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(x.numpy().astype(types.float8_e4m3fn).astype(x.numpy().dtype))

    return cast


PEERS = (
    Peer("torch eager", "torch", eager),
    Peer("torch.compile", "torch", compiled, slow=False),
    Peer("torchao", "torchao", torchao),
    Peer("ml_dtypes", "ml_dtypes", ml_dtypes, cpu_only=True),
)
