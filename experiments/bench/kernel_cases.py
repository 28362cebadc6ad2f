"""Define the benchmark's cases: the calls to time, and the bytes that a perfect kernel would move for each call."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fewbits.kernels import api, noise, packed
from fewbits.kernels.quantizer import Mixture, Quantizer

Work = Callable[[Tensor], object]
T = TypeVar("T")
SEED: Final = 1
SQUARE: Final = 32  # rows and columns of the squares of a weight; each square has one bit width
BITS: Final = 6.0  # the bit width of all squares
NOISE_BYTES: Final = {"gaussian": 0.5, "uniform": 2.0}  # per element


@dataclass(frozen=True)
class Case:
    """A call to measure, and the memory traffic that a perfect kernel would need for it."""

    name: str
    accesses: int  # how often a perfect kernel reads or writes each element in the tensor's dtype
    call: Callable[..., object]  # the public call of x and out, which is None or memory for the result, if it has any
    more_bytes: float = 0  # other bytes per element that a perfect kernel moves, such as the element's code
    dtype: torch.dtype | None = None  # None: the dtype of the run
    # What the call computes, for peers; a case without any of these has no peers.
    quantizer: Quantizer | None = None  # of fake_quantize
    axes: tuple[int, ...] = (-1,)  # along which it quantizes
    stats: bool = False  # with statistics
    sampler: Literal["gaussian", "uniform"] | None = None  # the noise of a sampled weight

    def traffic(self, itemsize: int) -> float:
        """Return the bytes that a perfect kernel moves, divided by those that a copy of the tensor moves.

        itemsize: the number of bytes of an element of the tensor.
        """
        return (self.accesses * itemsize + self.more_bytes) / (2 * itemsize)


def quantize(spec: str, axis: int = -1, stats: bool = False, dtype: torch.dtype | None = None) -> Case:
    q = Quantizer.parse(spec)
    more: dict[str, Any] = {"stats": True} if stats else {}
    return Case(
        spec + " axis=0" * (axis == 0) + " + stats" * stats + " of float32" * (dtype == torch.float32),
        _reads(q, axis) + 1,
        lambda x, out=None: api.fake_quantize(x, q, axis=axis, seed=SEED, out=out, **more),
        dtype=dtype,
        quantizer=q,
        axes=(axis,),
        stats=stats,
    )


def both_axes(spec: str) -> Case:
    q = Quantizer.parse(spec)

    def call(x: Tensor, out: Tensor | None = None) -> object:
        both = None if out is None else (out, _prepared(x, "second result", lambda: torch.empty_like(x)))
        return api.fake_quantize_both(x, q, q, row_seed=SEED, column_seed=SEED, out=both)

    return Case(
        f"both axes {spec}",
        max(_reads(q, axis) for axis in (-1, 0)) + 2,
        call,
        quantizer=q,
        axes=(-1, 0),
    )


def mix(name: str, spec: str) -> Case:
    """Return the case that applies the mixture `spec`.

    On the benchmark's data, every decision block takes the first entry. The case counts no further read of the input
    for the decisions, because a perfect kernel needs none.
    """
    mixture = Mixture.parse(spec)
    return Case(
        name,
        max(_reads(q, -1) for q in mixture.quantizers) + 1,
        lambda x, out=None: api.mix(x, mixture, seed=SEED, out=out),
    )


def sample_weight(kind: Literal["gaussian", "uniform"]) -> Case:
    """Return the case that samples weights (`gaussian`: GaussWS, `uniform`: DiffQ) in the dtype of w.

    One kernel writes the noise and another reads it, as in the GaussWS paper, so the traffic counts the noise twice.
    """
    return Case(
        f"sample_weight {kind}",
        2,
        lambda x, out=None: noise.sample_weight(x, _widths(x), SEED, noise=kind, block=SQUARE, dtype=x.dtype),
        more_bytes=2 * NOISE_BYTES[kind],
        sampler=kind,
    )


def generate(kind: Literal["gaussian", "uniform"]) -> Case:
    """Return the case that only generates noise, one value for each element of x."""
    draw = noise.gaussian_noise if kind == "gaussian" else noise.uniform_noise
    return Case(
        f"{kind}_noise ({NOISE_BYTES[kind]:g} bytes each)",
        0,
        lambda x, out=None: draw(x.numel(), SEED, device=x.device),
        more_bytes=NOISE_BYTES[kind],
    )


def encode(spec: str) -> Case:
    q = Quantizer.parse(spec)
    return Case(
        f"encode {spec}",
        _reads(q, -1),
        lambda x, out=None: packed.encode(x, q, seed=SEED),
        more_bytes=_stored_bytes(q),
    )


def decode(spec: str) -> Case:
    """Return the case that decodes packed storage to the dtype of x."""
    q = Quantizer.parse(spec)

    def call(x: Tensor, out: Tensor | None = None) -> Tensor:
        return packed.decode(_prepared(x, spec, lambda: packed.encode(x, q, seed=SEED)), out=out)

    return Case(f"decode {spec}", 1, call, more_bytes=_stored_bytes(q))


def _reads(q: Quantizer, axis: int) -> int:
    """Return how often a kernel must read the input: 1, or 2 if a scale depends on more elements than caches hold."""
    spans_tensor = bool(q.traits.groups) or (q.scaling != "none" and q.block.rows is None)
    return 2 if spans_tensor or (str(q.block) == "channel" and axis == 0) else 1


def _stored_bytes(q: Quantizer) -> float:
    """Return the bytes per element in packed storage: bytes of the code + bytes of a scale / elements of a block."""
    elements = (q.block.rows or math.inf) * (q.block.cols or math.inf)
    return q.format.stored_bits / 8 + {"none": 0, "amax": 4}.get(q.scaling, 1) / elements


def _widths(x: Tensor) -> Tensor:
    squares = [-(-n // SQUARE) for n in x.shape]
    return _prepared(x, "bit widths", lambda: torch.full(squares, BITS, device=x.device))


_PREPARED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _prepared(x: Tensor, name: str, make: Callable[[], T]) -> T:
    """Return an input that a case needs besides x; it is made in an untimed call, and kept as long as x exists."""
    kept: dict[str, T] = _PREPARED.setdefault(x, {})
    return kept[name] if name in kept else kept.setdefault(name, make())


CASES: Final[tuple[Case, ...]] = (
    *map(quantize, ("e4m3", "e4m3:tensor:amax")),
    quantize("e4m3:tensor:amax", stats=True),
    quantize("e4m3:channel:amax"),
    quantize("e4m3:channel:amax", stats=True),
    quantize("e4m3:channel:amax", axis=0),
    quantize("e4m3:128x128:amax"),
    quantize("e4m3:128x128:amax", stats=True),
    quantize("e4m3:128x128:gam"),
    quantize("e4m3:128x128:gam", stats=True),
    *map(quantize, ("e4m3:1x128:amax", "e4m3:1x32:e8m0", "e2m3:1x32:e8m0", "e2m1:1x32:e8m0", "e2m1:1x32:mx")),
    quantize("e2m1:1x16:nvfp4"),
    quantize("e2m1:1x16:nvfp4", axis=0),
    *map(quantize, ("e2m1:16x16:nvfp4", "e2m1:1x16:nvfp4:stochastic", "e2m1:1x16:fouroversix")),
    quantize("e2m1:1x16:fouroversix", axis=0),
    *map(quantize, ("e2m1:1x16:nvfp4:group=row", "e2m1:1x16:nvfp4:group=128", "e2m1:1x16:nvfp4:factor=16/17")),
    *map(quantize, ("e2m1:1x16:fouroversix:select=mae", "e2m1:1x16:fouroversix:select=mse:target=256")),
    *map(quantize, ("e2m1:16x16:fouroversix", "e2m1:1x16:fouroversix:stochastic", "e2m1:1x16:nvfp4:rht16")),
    quantize("e2m1:1x16:nvfp4:rht16", axis=0),
    quantize("e2m1:1x16:nvfp4:stochastic:rht16"),
    quantize("bf16:stochastic", dtype=torch.float32),
    both_axes("e4m3:1x32:e8m0"),
    both_axes("e2m1:1x16:nvfp4"),
    mix("mix e4m3 | bf16 per tensor", "e4m3:128x128:gam @ error<0.045 | bf16"),
    mix(
        "mix e4m3 | e5m2 | bf16 per block",
        "e4m3:128x128:gam @ error<e5m2:128x128:gam | e5m2:128x128:gam @ spread<normal | bf16 ; per=block",
    ),
    *map(encode, ("e2m1:1x16:nvfp4", "e4m3:128x128:gam")),
    *map(decode, ("e2m1:1x16:nvfp4", "e4m3:128x128:gam")),
    sample_weight("gaussian"),
    sample_weight("uniform"),
    generate("gaussian"),
    generate("uniform"),
)
