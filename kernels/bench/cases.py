"""Define the benchmark's cases: the calls to time, and the bytes that a perfect kernel would move for each call."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fewbits.kernels import api, noise, packed
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.backends.protocol import Backend
from fewbits.kernels.bench import eager
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
    fresh: Work  # the public call, which returns new tensors
    into: Callable[[Tensor, Tensor], object]  # the call that writes into memory that was written before; see has_out
    more_bytes: float = 0  # other bytes per element that a perfect kernel moves, such as the element's code
    has_out: bool = False  # False: no public call has out=, so `into` calls the backend, which allocates its results
    dtype: torch.dtype | None = None  # None: the dtype of the run
    eager: Work | None = None  # the same computation in plain torch
    plain: Quantizer | None = None  # set if the case is fake_quantize along rows without statistics: its quantizer
    is_noise: bool = False  # the case only generates noise: one value for each element of the tensor

    def traffic(self, itemsize: int) -> float:
        """Return the bytes that a perfect kernel moves, divided by those that a copy of the tensor moves.

        itemsize: the number of bytes of an element of the tensor.
        """
        return (self.accesses * itemsize + self.more_bytes) / (2 * itemsize)


def quantize(spec: str, axis: int = -1, stats: bool = False, dtype: torch.dtype | None = None) -> Case:
    q = Quantizer.parse(spec)
    name = spec + " axis=0" * (axis == 0) + " + stats" * stats + " of float32" * (dtype == torch.float32)
    accesses = _reads(q, axis) + 1
    if stats:
        return Case(
            name,
            accesses,
            fresh=lambda x: api.fake_quantize(x, q, axis=axis, seed=SEED, stats=True),
            into=lambda x, out: api.fake_quantize(x, q, axis=axis, seed=SEED, out=out, stats=True),
            has_out=True,
            dtype=dtype,
            eager=partial(eager.with_error, q=q, axis=axis),
        )
    return Case(
        name,
        accesses,
        fresh=lambda x: api.fake_quantize(x, q, axis=axis, seed=SEED),
        into=lambda x, out: api.fake_quantize(x, q, axis=axis, seed=SEED, out=out),
        has_out=True,
        dtype=dtype,
        eager=partial(eager.fake_quantize, q=q, axis=axis),
        plain=q if axis == -1 else None,
    )


def both_axes(spec: str) -> Case:
    q = Quantizer.parse(spec)

    def into(x: Tensor, out: Tensor) -> object:
        second = _prepared(x, "second result", lambda: torch.empty_like(x))
        return api.fake_quantize_both(x, q, q, row_seed=SEED, column_seed=SEED, out=(out, second))

    return Case(
        f"both axes {spec}",
        max(_reads(q, axis) for axis in (-1, 0)) + 2,
        fresh=lambda x: api.fake_quantize_both(x, q, q, row_seed=SEED, column_seed=SEED),
        into=into,
        has_out=True,
        eager=lambda x: (eager.fake_quantize(x, q, -1), eager.fake_quantize(x, q, 0)),
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
        fresh=lambda x: api.mix(x, mixture, seed=SEED),
        into=lambda x, out: api.mix(x, mixture, seed=SEED, out=out),
        has_out=True,
        eager=partial(eager.mix_tensor if mixture.per == "tensor" else eager.mix_blocks, mixture=mixture),
    )


def sample_weight(kind: Literal["gaussian", "uniform"]) -> Case:
    """Return the case that samples weights (`gaussian`: GaussWS, `uniform`: DiffQ) in the dtype of w.

    One kernel writes the noise and another reads it, as in the GaussWS paper, so the traffic counts the noise twice.
    """
    return Case(
        f"sample_weight {kind}",
        accesses=2,
        more_bytes=2 * NOISE_BYTES[kind],
        fresh=lambda x: noise.sample_weight(x, _widths(x), SEED, noise=kind, block=SQUARE, dtype=x.dtype),
        into=lambda x, out: _backend(x).sample_weight(x, _widths(x), SEED, kind, SQUARE, x.dtype),
        eager=partial(eager.sample, draw=eager.DRAWS[kind], bits=BITS, square=SQUARE),
    )


def gaussian_noise() -> Case:
    return Case(
        "gaussian_noise (4 bits)",
        accesses=0,
        more_bytes=NOISE_BYTES["gaussian"],
        fresh=lambda x: noise.gaussian_noise(x.numel(), SEED, device=x.device),
        into=lambda x, out: _backend(x).gaussian_noise(x.numel(), SEED, x.device),
        is_noise=True,
    )


def uniform_noise() -> Case:
    return Case(
        "uniform_noise (bfloat16)",
        accesses=0,
        more_bytes=NOISE_BYTES["uniform"],
        fresh=lambda x: noise.uniform_noise(x.numel(), SEED, device=x.device),
        into=lambda x, out: _backend(x).uniform_noise(x.numel(), SEED, x.device),
        is_noise=True,
    )


def encode(spec: str) -> Case:
    q = Quantizer.parse(spec)
    return Case(
        f"encode {spec}",
        accesses=_reads(q, -1),
        more_bytes=_stored_bytes(q),
        fresh=lambda x: packed.encode(x, q, seed=SEED),
        into=lambda x, out: _backend(x).encode(x, q, -1, SEED),
    )


def decode(spec: str) -> Case:
    """Return the case that decodes packed storage to the dtype of x."""
    q = Quantizer.parse(spec)

    def call(x: Tensor, out: Tensor | None = None) -> Tensor:
        return packed.decode(_prepared(x, spec, lambda: packed.encode(x, q, seed=SEED)), out=out)

    return Case(f"decode {spec}", accesses=1, more_bytes=_stored_bytes(q), fresh=call, into=call, has_out=True)


def _backend(x: Tensor) -> Backend:
    return backend_for(x.device.type)


def _reads(q: Quantizer, axis: int) -> int:
    """Return how often a kernel must read the input: 1, or 2 if a scale depends on more elements than caches hold."""
    spans_tensor = bool(q.traits.groups) or (q.scaling != "none" and q.block.rows is None)
    spans_columns = str(q.block) == "channel" and axis == 0
    return 2 if spans_tensor or spans_columns else 1


def _stored_bytes(q: Quantizer) -> float:
    """Return the bytes per element in packed storage: bytes of the code + bytes of a scale / elements of a block."""
    elements = (q.block.rows or math.inf) * (q.block.cols or math.inf)
    scale = {"none": 0, "amax": 4}.get(q.scaling, 1)
    return q.format.stored_bits / 8 + scale / elements


def _widths(x: Tensor) -> Tensor:
    squares = [-(-n // SQUARE) for n in x.shape]
    return _prepared(x, "bit widths", lambda: torch.full(squares, BITS, device=x.device))


_PREPARED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _prepared(x: Tensor, name: str, make: Callable[[], T]) -> T:
    """Return an input that a case needs besides x, from a cache with the key (x, name).

    `make` creates the input at the first use, in a call that is not timed. The cache keeps the input as long as x
    exists.
    """
    kept: dict[str, T] = _PREPARED.setdefault(x, {})
    if name not in kept:
        kept[name] = make()
    return kept[name]


CASES: Final[tuple[Case, ...]] = (
    quantize("e4m3"),
    quantize("e4m3:tensor:amax"),
    quantize("e4m3:tensor:amax", stats=True),
    quantize("e4m3:channel:amax"),
    quantize("e4m3:channel:amax", stats=True),
    quantize("e4m3:channel:amax", axis=0),
    quantize("e4m3:128x128:amax"),
    quantize("e4m3:128x128:amax", stats=True),
    quantize("e4m3:128x128:gam"),
    quantize("e4m3:128x128:gam", stats=True),
    quantize("e4m3:1x128:amax"),
    quantize("e4m3:1x32:e8m0"),
    quantize("e2m3:1x32:e8m0"),
    quantize("e2m1:1x32:e8m0"),
    quantize("e2m1:1x32:mx"),
    quantize("e2m1:1x16:nvfp4"),
    quantize("e2m1:1x16:nvfp4", axis=0),
    quantize("e2m1:16x16:nvfp4"),
    quantize("e2m1:1x16:nvfp4:stochastic"),
    quantize("e2m1:1x16:fouroversix"),
    quantize("e2m1:1x16:fouroversix", axis=0),
    quantize("e2m1:16x16:fouroversix"),
    quantize("e2m1:1x16:fouroversix:stochastic"),
    quantize("e2m1:1x16:nvfp4:rht16"),
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
    encode("e2m1:1x16:nvfp4"),
    encode("e4m3:128x128:gam"),
    decode("e2m1:1x16:nvfp4"),
    decode("e4m3:128x128:gam"),
    sample_weight("gaussian"),
    sample_weight("uniform"),
    gaussian_noise(),
    uniform_noise(),
)
