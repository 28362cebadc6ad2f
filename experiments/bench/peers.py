"""Implement the benchmark's cases with other libraries: torch, torch.compile, torchao and ml_dtypes.

A peer is another implementation. For a case it returns a function of the tensor, which returns new tensors in the dtype
of x, or None if it does not implement the case.

"torch eager" and "torch.compile" are quantizers, mixtures and samplers as users without custom kernels would write
them: vectorised, in float32, with casts to torch's float8 dtypes where torch has the format. They use torch's random
numbers, and the only statistic that they compute is the mean relative error. So they never do more work than our
kernels.
"""

import logging
import math
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
from fewbits.kernels.quantizer import ErrorBelow, Mixture, Quantizer
from fewbits.kernels.reference.rotation import hadamard, hadamard_signs


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

EXPONENT, MANTISSA = 0x7F800000, 0x007FFFFF
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _blocks(x: Tensor, q: Quantizer, axis: int) -> Tensor:
    rows, cols = x.shape
    r, c = q.block.resolve((rows, cols), axis)
    return x.view(rows // r, r, cols // c, c)


def _bits(x: Tensor, mask: int) -> Tensor:
    return x.view(torch.int32) & mask


def _factors(amax: Tensor, q: Quantizer) -> tuple[Tensor, Tensor]:
    """Return (before, after): the factors by which each block is multiplied before and after rounding.

    amax: the largest magnitude of each block. Both results have the shape of `amax`.
    """
    top = q.format.max
    s = top / amax
    match q.scaling:
        case "gam":
            group = top / amax.amax()
            less = _bits(s, MANTISSA) < _bits(group, MANTISSA)
            s = (_bits(s, EXPONENT) - (less.to(torch.int32) << 23) | _bits(group, MANTISSA)).view(torch.float32)
        case "e8m0":
            s = _bits(s, EXPONENT).view(torch.float32)
        case "mx":
            ours = (127 + math.frexp(top)[1] - 1) << 23
            s = (ours - _bits(amax, EXPONENT) + (127 << 23)).view(torch.float32)
        case "nvfp4":
            g = top * 448 / amax.amax()
            s8 = (amax * (g / top)).clamp(max=448).to(torch.float8_e4m3fn).float()
            return g / s8, s8 / g
    return s, 1 / s


def _round(v: Tensor, q: Quantizer) -> Tensor:
    f = q.format
    if not q.needs_seed and f.name in TORCH_DTYPES:
        return v.clamp(-f.max, f.max).to(TORCH_DTYPES[f.name]).float()
    step = _bits(v, EXPONENT).view(torch.float32).clamp(min=2.0**f.emin) * 2.0**-f.mantissa_bits
    steps = v / step
    steps = (steps + torch.rand_like(steps)).floor() if q.needs_seed else steps.round()
    return (steps * step).clamp(-f.max, f.max)


def _rotate(x: Tensor, q: Quantizer, axis: int) -> Tensor:
    if not q.hadamard:
        return x
    signs = hadamard_signs(q, x.device)
    matrix = (signs[:, None] * hadamard(torch.eye(q.hadamard, device=x.device))).to(x.dtype)
    if axis == 0:
        return (matrix.T @ x.view(-1, q.hadamard, x.shape[1])).view(x.shape)
    return (x.view(-1, q.hadamard) @ matrix).view(x.shape)


def fake_quantize(x: Tensor, q: Quantizer, axis: int) -> Tensor:
    # BF16 with stochastic rounding: the lower 16 bits are the probability of rounding up.
    if q.scaling == "none" and q.format.name == "bf16" and q.needs_seed:
        odds = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
        return (x.view(torch.int32) + odds & ~0xFFFF).view(torch.float32)
    if q.scaling == "none":
        return _round(x.float(), q).to(x.dtype)
    v = _blocks(_rotate(x, q, axis).float(), q, axis)
    amax = v.abs().amax((1, 3), keepdim=True)
    encode, decode = _factors(amax, q)
    return (_round(v * encode, q) * decode).view(x.shape).to(x.dtype)


def _errors(x: Tensor, y: Tensor) -> Tensor:
    """Return the relative errors |x − y| / |x|, element by element; zero where x is zero."""
    x, y = x.float(), y.float()
    return torch.where(x == 0, 0, (x - y).abs() / x.abs())


def with_error(x: Tensor, q: Quantizer, axis: int) -> tuple[Tensor, Tensor]:
    y = fake_quantize(x, q, axis)
    return y, _errors(_rotate(x, q, axis), y).sum() / (x != 0).sum()


def mix_tensor(x: Tensor, mixture: Mixture) -> Tensor:
    first = mixture.entries[0]
    assert isinstance(first.test, ErrorBelow)
    y, error = with_error(x, first.quantizer, -1)
    return y if bool(error < first.test.threshold) else x.clone()


def mix_blocks(x: Tensor, mixture: Mixture) -> Tensor:
    first, second = mixture.entries[0].quantizer, mixture.entries[1].quantizer
    blocks, values, errors = _blocks(x, first, -1), [], []
    for q in (first, second):
        y = fake_quantize(x, q, -1)
        values.append(_blocks(y, first, -1))
        errors.append(_blocks(_errors(x, y), first, -1).sum((1, 3), keepdim=True))
    size = blocks.abs()
    smallest = torch.where(size == 0, math.inf, size).amin((1, 3), keepdim=True)
    narrow = size.amax((1, 3), keepdim=True) / smallest < second.format.spread
    return torch.where(errors[0] < errors[1], values[0], torch.where(narrow, values[1], blocks)).view(x.shape)


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
    if mixture := case.mixture:
        return partial(mix_tensor if mixture.per == "tensor" else mix_blocks, mixture=mixture)
    if (q := case.quantizer) is None or q.scaling == "fouroversix":
        return None
    if len(case.axes) > 1:
        return lambda x: tuple(fake_quantize(x, q, axis) for axis in case.axes)
    return partial(with_error if case.stats else fake_quantize, q=q, axis=case.axes[0])


def compiled(case: Case) -> Work | None:
    torch.compiler.reset()  # every case is compiled separately
    work = eager(case)
    return work and torch.compile(work, dynamic=False)


# ------------------------------------------------------------------------------------------------ torchao, ml_dtypes


def torchao(case: Case) -> Work | None:
    q = case.quantizer
    if q is None or case.axes != (-1,) or case.stats or q.hadamard or q.needs_seed:
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
