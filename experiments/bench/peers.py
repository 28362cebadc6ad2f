"""Implement the benchmark's cases with other libraries: torch, torch.compile, torchao, ml_dtypes and noise generators.

A peer is another implementation. For a case it returns a function of the tensor, or None if it does not implement the
case. All functions return new tensors in the dtype of x, except those of noise generators, which write into the
same memory in every call.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.experiments.bench.kernel_cases import SEED, Case, Work
from fewbits.experiments.bench.measure import in_touched_memory
from fewbits.kernels.backends import cpu
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
        try:
            with quiet():
                import_module(self.package)
        except ModuleNotFoundError:
            return "it is not installed"
        except Exception as error:  # the import of another package may fail in any way
            return f"its import failed: {first_line(error)}"
        return None

    @property
    def version(self) -> str:
        return str(getattr(import_module(self.package), "__version__", ""))


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


def compiled(case: Case) -> Work | None:
    torch.compiler.reset()  # every case is compiled separately
    return case.eager and torch.compile(case.eager, dynamic=False)


# ------------------------------------------------------------------------------------------------ torchao, ml_dtypes


def torchao(case: Case) -> Work | None:
    q = case.plain
    if q is None or q.hadamard or q.needs_seed:
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
    if case.plain != Quantizer("e4m3"):
        return None
    types: Any = import_module("ml_dtypes")

    def cast(x: Tensor) -> object:
        if x.dtype == torch.bfloat16:
            array = x.view(torch.uint16).numpy().view(types.bfloat16)
            rounded = array.astype(types.float8_e4m3fn).astype(types.bfloat16)
            return torch.from_numpy(rounded.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(x.numpy().astype(types.float8_e4m3fn).astype(x.numpy().dtype))

    return cast


# ------------------------------------------------------------------------------------------------ noise


def randn() -> Work:
    """Return a function that fills a buffer with normally distributed numbers; each shape has one buffer."""
    buffers: dict[torch.Size, Tensor] = {}

    def fill(x: Tensor) -> Tensor:
        if x.shape not in buffers:
            buffers[x.shape] = torch.zeros(x.shape, device=x.device)
        return buffers[x.shape].normal_()

    return fill


def box_muller() -> Work:
    """Return a function that draws round(N(0, 1) / 2) in C++, the noise that GaussWS's generator approximates."""
    return in_touched_memory(lambda x: cpu.box_muller(x.numel(), SEED))


PEERS = (
    Peer("torch eager", "torch", lambda case: case.eager),
    Peer("torch.compile", "torch", compiled, slow=False),
    Peer("torchao", "torchao", torchao),
    Peer("ml_dtypes", "ml_dtypes", ml_dtypes, cpu_only=True),
    Peer("torch.randn", "torch", lambda case: randn() if case.is_noise else None),
    Peer("Box–Muller", "fewbits", lambda case: box_muller() if case.is_noise else None, cpu_only=True),
)
