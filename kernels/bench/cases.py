"""Define the benchmark cases: the calls of each, and the bytes that a perfect kernel would move for it.

`fresh` is the public call, which returns new tensors. `into` writes into memory that was written before: the buffer it
is given, or, if `has_out` is false, a result of its own, for which the benchmark provides such memory. If there is no
public call with out=, `into` calls the backend.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fewbits.kernels.api import fake_quantize, fake_quantize_both, mix
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.mixing import mix_matrix
from fewbits.kernels.noise import gaussian_noise, sample_weight, uniform_noise
from fewbits.kernels.packed import Packed, decode, encode
from fewbits.kernels.quantizer import Mixture, Quantizer

SEED = 1
NOISE_BYTES = {"gaussian": 0.5, "uniform": 2.0}  # per element


def reads(q: Quantizer, axis: int) -> int:
    """Return how often a kernel must read the input: twice if a scale spans more than stays in a cache."""
    spans_tensor = bool(q.traits.groups) or (q.scaling != "none" and q.block.rows is None)
    spans_columns = str(q.block) == "channel" and axis == 0
    return 2 if spans_tensor or spans_columns else 1


@dataclass(frozen=True)
class Quantize:
    spec: str
    axis: int = -1
    stats: bool = False
    dtype: torch.dtype | None = None  # None: the dtype of the run
    has_out: ClassVar[bool] = True

    @property
    def q(self) -> Quantizer:
        return Quantizer.parse(self.spec)

    @property
    def name(self) -> str:
        marks = (" axis=0" * (self.axis == 0), " + stats" * self.stats, " of float32" * (self.dtype == torch.float32))
        return self.spec + "".join(marks)

    def traffic(self, itemsize: int) -> float:
        return (reads(self.q, self.axis) + 1) / 2

    def into(self, x: Tensor, out: Tensor) -> None:
        if self.stats:
            backend_for(x.device.type).quantize(x, self.q, self.axis, SEED, out=out, want_stats=True)
        else:
            fake_quantize(x, self.q, axis=self.axis, seed=SEED, out=out)

    def fresh(self, x: Tensor) -> object:
        if self.stats:
            return fake_quantize(x, self.q, axis=self.axis, seed=SEED, stats=True)
        return fake_quantize(x, self.q, axis=self.axis, seed=SEED)


@dataclass(frozen=True)
class QuantizerCase:
    """A case in the dtype of the run that returns new tensors."""

    spec: str
    dtype: ClassVar[torch.dtype | None] = None
    has_out: ClassVar[bool] = False

    @property
    def q(self) -> Quantizer:
        return Quantizer.parse(self.spec)


@dataclass(frozen=True)
class Both(QuantizerCase):
    @property
    def name(self) -> str:
        return f"both axes {self.spec}"

    def traffic(self, itemsize: int) -> float:
        return (max(reads(self.q, axis) for axis in (-1, 0)) + 2) / 2

    def into(self, x: Tensor, out: Tensor) -> object:
        return backend_for(x.device.type).quantize_both(x, self.q, self.q, SEED, SEED)

    def fresh(self, x: Tensor) -> object:
        return fake_quantize_both(x, self.q, self.q, row_seed=SEED, column_seed=SEED)


@dataclass(frozen=True)
class Mix:
    name: str
    spec: str
    dtype: ClassVar[torch.dtype | None] = None
    has_out: ClassVar[bool] = False

    @property
    def mixture(self) -> Mixture:
        return Mixture.parse(self.spec)

    def traffic(self, itemsize: int) -> float:
        """Return the traffic relative to a copy, with the tensor's decision for the first entry, as on this data.

        A decision per block needs no extra read.
        """
        return (max(reads(q, -1) for q in self.mixture.quantizers) + 1) / 2

    def into(self, x: Tensor, out: Tensor) -> object:
        return mix_matrix(backend_for(x.device.type), x, self.mixture, -1, SEED)

    def fresh(self, x: Tensor) -> object:
        return mix(x, self.mixture, seed=SEED)


@dataclass(frozen=True)
class Sample:
    """Sampled weights of GaussWS: bit widths per 32x32 square, in the dtype of w."""

    noise: Literal["gaussian", "uniform"]
    block: ClassVar[int] = 32
    bits: ClassVar[float] = 6.0
    dtype: ClassVar[torch.dtype | None] = None
    has_out: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"sample_weight {self.noise}"

    def traffic(self, itemsize: int) -> float:
        """Return the traffic relative to a copy; the noise is written and read between two kernels, as in the paper."""
        return 1 + NOISE_BYTES[self.noise] / itemsize

    def widths(self, x: Tensor) -> Tensor:
        return torch.full([-(-n // self.block) for n in x.shape], self.bits, device=x.device)

    def into(self, x: Tensor, out: Tensor) -> object:
        return backend_for(x.device.type).sample_weight(x, self.widths(x), SEED, self.noise, self.block, x.dtype)

    def fresh(self, x: Tensor) -> object:
        return sample_weight(x, self.widths(x), SEED, noise=self.noise, block=self.block, dtype=x.dtype)


@dataclass(frozen=True)
class Noise:
    """Noise, with as many values as the tensor has elements."""

    kind: Literal["gaussian", "uniform"]
    dtype: ClassVar[torch.dtype | None] = None
    has_out: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return {"gaussian": "gaussian_noise (4 bits)", "uniform": "uniform_noise (bfloat16)"}[self.kind]

    def traffic(self, itemsize: int) -> float:
        return NOISE_BYTES[self.kind] / (2 * itemsize)

    def into(self, x: Tensor, out: Tensor) -> object:
        backend = backend_for(x.device.type)
        return {"gaussian": backend.gaussian_noise, "uniform": backend.uniform_noise}[self.kind](
            x.numel(), SEED, x.device
        )

    def fresh(self, x: Tensor) -> object:
        return {"gaussian": gaussian_noise, "uniform": uniform_noise}[self.kind](x.numel(), SEED, device=x.device)


def stored_bytes(q: Quantizer) -> float:
    """Return the bytes of an element in packed storage: its code, and its share of its block's scale."""
    elements = (q.block.rows or math.inf) * (q.block.cols or math.inf)
    scale = {"none": 0, "amax": 4}.get(q.scaling, 1)
    return q.format.stored_bits / 8 + scale / elements


@dataclass(frozen=True)
class Encode(QuantizerCase):
    """A case that encodes to packed storage."""

    @property
    def name(self) -> str:
        return f"encode {self.spec}"

    def traffic(self, itemsize: int) -> float:
        return (reads(self.q, -1) * itemsize + stored_bytes(self.q)) / (2 * itemsize)

    def into(self, x: Tensor, out: Tensor) -> object:
        return backend_for(x.device.type).encode(x, self.q, -1, SEED)

    def fresh(self, x: Tensor) -> object:
        return encode(x, self.q, seed=SEED)


_STORED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensors encoded before the timer starts


@dataclass(frozen=True)
class Decode(QuantizerCase):
    """A case that decodes packed storage to the dtype of x."""

    @property
    def name(self) -> str:
        return f"decode {self.spec}"

    def traffic(self, itemsize: int) -> float:
        return (stored_bytes(self.q) + itemsize) / (2 * itemsize)

    def stored(self, x: Tensor) -> Packed:
        packed: Packed | None = _STORED.get(x)
        if packed is None or packed.quantizer != self.q:
            packed = _STORED[x] = encode(x, self.q, seed=SEED)
        return packed

    def into(self, x: Tensor, out: Tensor) -> object:
        return decode(self.stored(x))

    def fresh(self, x: Tensor) -> object:
        return decode(self.stored(x))


Case = Quantize | Both | Mix | Sample | Noise | Encode | Decode

CASES: tuple[Case, ...] = (
    Quantize("e4m3"),
    Quantize("e4m3:tensor:amax"),
    Quantize("e4m3:tensor:amax", stats=True),
    Quantize("e4m3:channel:amax"),
    Quantize("e4m3:channel:amax", stats=True),
    Quantize("e4m3:128x128:amax"),
    Quantize("e4m3:128x128:amax", stats=True),
    Quantize("e4m3:128x128:gam"),
    Quantize("e4m3:128x128:gam", stats=True),
    Quantize("e4m3:1x128:amax"),
    Quantize("e4m3:1x32:e8m0"),
    Quantize("e2m3:1x32:e8m0"),
    Quantize("e2m1:1x32:e8m0"),
    Quantize("e2m1:1x32:mx"),
    Quantize("e2m1:1x16:nvfp4"),
    Quantize("e2m1:1x16:nvfp4", axis=0),
    Quantize("e2m1:16x16:nvfp4"),
    Quantize("e2m1:1x16:nvfp4:stochastic"),
    Quantize("e2m1:1x16:nvfp4:rht16"),
    Quantize("e2m1:1x16:nvfp4:rht16", axis=0),
    Quantize("e2m1:1x16:nvfp4:stochastic:rht16"),
    Quantize("bf16:stochastic", dtype=torch.float32),
    Both("e4m3:1x32:e8m0"),
    Both("e2m1:1x16:nvfp4"),
    Mix("mix e4m3 | bf16 per tensor", "e4m3:128x128:gam @ error<0.045 | bf16"),
    Mix(
        "mix e4m3 | e5m2 | bf16 per block",
        "e4m3:128x128:gam @ error<e5m2:128x128:gam | e5m2:128x128:gam @ spread<normal | bf16 ; per=block",
    ),
    Encode("e2m1:1x16:nvfp4"),
    Encode("e4m3:128x128:gam"),
    Decode("e2m1:1x16:nvfp4"),
    Decode("e4m3:128x128:gam"),
    Sample("gaussian"),
    Sample("uniform"),
    Noise("gaussian"),
    Noise("uniform"),
)
