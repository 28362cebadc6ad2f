"""Implement the same work with other libraries, for comparison: plain torch, torch.compile, torchao and ml_dtypes.

A peer turns a case into a function of the tensor, or into None if it does not implement the case. All functions return
new tensors in the dtype of x. The eager form is what one writes without a custom kernel: vectorised, float32 inside,
casts through torch.float8_e4m3fn if torch has the format. Of the statistics it computes only the mean relative error,
and it uses torch's random numbers: less work than ours does, never more.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.kernels.backends import cpu
from fewbits.kernels.bench.cases import SEED, Both, Case, Decode, Encode, Mix, Noise, Quantize, Sample
from fewbits.kernels.bench.measure import TouchedMemory
from fewbits.kernels.quantizer import ErrorBelow, Mixture, Quantizer
from fewbits.kernels.reference.rotation import hadamard_signs

Work = Callable[[Tensor], object]

EXPONENT, MANTISSA = 0x7F800000, 0x007FFFFF
TORCH_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Peer:
    """A library to compare with; `work(case)` is its function for the case, or None.

    package: must be importable.
    slow: the peer may get fewer rows.
    """

    name: str
    package: str
    work: Callable[[Case], Work | None]
    slow: bool = True

    def missing(self) -> str | None:
        """Return why the peer cannot take part, or None if it can."""
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
    """Silence torchao's warnings of missing GPU libraries and torch.compile's of graph breaks."""
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


# ------------------------------------------------------------------------------------------------ torch eager


def eager(case: Case) -> Work | None:
    match case:
        case Quantize(stats=True):
            return partial(_with_error, q=case.q, axis=case.axis)
        case Quantize():
            return partial(_fake_quantize, q=case.q, axis=case.axis)
        case Both():
            return partial(_both, q=case.q)
        case Mix() if case.mixture.per == "tensor":
            return partial(_mix_tensor, mixture=case.mixture)
        case Mix():
            return partial(_mix_blocks, mixture=case.mixture)
        case Sample():
            return partial(_sample, case=case)
        case Noise() | Encode() | Decode():
            return None


def _blocks(x: Tensor, q: Quantizer, axis: int) -> Tensor:
    rows, cols = x.shape
    r, c = q.block.resolve((rows, cols), axis)
    return x.view(rows // r, r, cols // c, c)


def _bits(x: Tensor, mask: int) -> Tensor:
    return x.view(torch.int32) & mask


def _factors(amax: Tensor, q: Quantizer) -> tuple[Tensor, Tensor]:
    """Return what blocks are multiplied by before and after rounding."""
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
    matrix = torch.ones(1, 1, device=x.device)
    while matrix.shape[0] < q.hadamard:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=x.device))
    signs = hadamard_signs(q, x.device)
    matrix = (signs[:, None] * matrix / q.hadamard**0.5).to(x.dtype)
    if axis == 0:
        return (matrix.T @ x.view(-1, q.hadamard, x.shape[1])).view(x.shape)
    return (x.view(-1, q.hadamard) @ matrix).view(x.shape)


def _fake_quantize(x: Tensor, q: Quantizer, axis: int) -> Tensor:
    if q.scaling == "none" and q.format.name == "bf16" and q.needs_seed:  # lower half: probability
        odds = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
        return (x.view(torch.int32) + odds & ~0xFFFF).view(torch.float32)
    if q.scaling == "none":
        return _round(x.float(), q).to(x.dtype)
    v = _blocks(_rotate(x, q, axis).float(), q, axis)
    encode, decode = _factors(v.abs().amax((1, 3), keepdim=True), q)
    return (_round(v * encode, q) * decode).view(x.shape).to(x.dtype)


def _errors(x: Tensor, y: Tensor) -> Tensor:
    """Return the relative errors, zero where x is zero."""
    x, y = x.float(), y.float()
    return torch.where(x == 0, 0, (x - y).abs() / x.abs())


def _with_error(x: Tensor, q: Quantizer, axis: int) -> tuple[Tensor, Tensor]:
    y = _fake_quantize(x, q, axis)
    return y, _errors(_rotate(x, q, axis), y).sum() / (x != 0).sum()


def _both(x: Tensor, q: Quantizer) -> tuple[Tensor, Tensor]:
    return _fake_quantize(x, q, -1), _fake_quantize(x, q, 0)


def _mix_tensor(x: Tensor, mixture: Mixture) -> Tensor:
    first = mixture.entries[0]
    assert isinstance(first.test, ErrorBelow)
    y, error = _with_error(x, first.quantizer, -1)
    return y if bool(error < first.test.threshold) else x.clone()


def _mix_blocks(x: Tensor, mixture: Mixture) -> Tensor:
    first, second = mixture.entries[0].quantizer, mixture.entries[1].quantizer
    blocks, values, errors = _blocks(x, first, -1), [], []
    for q in (first, second):
        y = _fake_quantize(x, q, -1)
        values.append(_blocks(y, first, -1))
        errors.append(_blocks(_errors(x, y), first, -1).sum((1, 3), keepdim=True))
    size = blocks.abs()
    smallest = torch.where(size == 0, math.inf, size).amin((1, 3), keepdim=True)
    narrow = size.amax((1, 3), keepdim=True) / smallest < second.format.spread
    return torch.where(errors[0] < errors[1], values[0], torch.where(narrow, values[1], blocks)).view(x.shape)


def _sample(w: Tensor, case: Sample) -> Tensor:
    rows, cols = w.shape
    squares = w.float().view(rows // case.block, case.block, cols // case.block, case.block)
    scale = squares.abs().amax((1, 3), keepdim=True) * 2.0 ** (1 - case.bits)
    gaussian = case.noise == "gaussian"
    noise = (torch.randn_like(squares) / 2).round() if gaussian else torch.rand_like(squares) - 0.5
    return (squares + noise * scale).view(w.shape).to(w.dtype)


def compiled(case: Case) -> Work | None:
    work = eager(case)
    torch.compiler.reset()  # every case is compiled separately
    return None if work is None else torch.compile(work, dynamic=False)


# ------------------------------------------------------------------------------------------------ torchao, ml_dtypes


def torchao(case: Case) -> Work | None:
    if not isinstance(case, Quantize) or case.axis != -1 or case.stats or case.q.hadamard or case.q.needs_seed:
        return None
    q = case.q
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
    if not isinstance(case, Quantize) or case.q != Quantizer("e4m3"):
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


def randn(case: Case) -> Work | None:
    """Fill a buffer that was allocated before, on as many threads as torch uses."""
    if not isinstance(case, Noise):
        return None
    buffers: dict[torch.Size, Tensor] = {}

    def fill(x: Tensor) -> None:
        buffers.setdefault(x.shape, torch.zeros(x.shape)).normal_()

    return fill


def own_box_muller(case: Case) -> Work | None:
    """Run the generator that GaussWS replaces, in our C++: round(N(0, 1) / 2), packed like gaussian_noise."""
    if not isinstance(case, Noise):
        return None
    memory = TouchedMemory()

    def fill(x: Tensor) -> None:
        with memory:
            cpu.box_muller(x.numel(), SEED)

    return fill


PEERS = (
    Peer("torch eager", "torch", eager),
    Peer("torch.compile", "torch", compiled, slow=False),
    Peer("torchao", "torchao", torchao),
    Peer("ml_dtypes", "ml_dtypes", ml_dtypes),
)
GENERATORS = (
    Peer("torch.randn", "torch", randn),
    Peer("Box–Muller", "fewbits", own_box_muller),
)
