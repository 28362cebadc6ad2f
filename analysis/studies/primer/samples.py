"""Share tensors, grids of values and errors between the primer's checks and figures; all draws have fixed seeds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.figures.theme import Array
from fewbits.kernels.accumulators import product
from fewbits.kernels.api import fake_quantize
from fewbits.kernels.formats import TABLE
from fewbits.kernels.packed import encode
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.reference.rotation import rotate

FORMATS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "fp16", "bf16")
SHAPE = (512, 1024)
LENGTHS = (128, 512, 1024, 4096)  # numbers K of products that a sum adds
SIDE = 48  # the result of a product of matrices has SIDE × SIDE sums
SUMS = ("fp32", "fp16", "bf16", "hopper-fp8", "hopper-fp8-promoted")  # accumulators
E4M3, FP16 = torch.float8_e4m3fn, torch.float16


@cache
def tensors() -> dict[str, Tensor]:
    """Return five tensors of SHAPE by the names of their distributions."""
    drawn = torch.Generator().manual_seed(7)
    normal = torch.randn(SHAPE, generator=drawn)
    uniform = torch.rand(SHAPE, generator=drawn) * 2 - 1
    chi = torch.randn((4, *SHAPE), generator=drawn).square().sum(0)
    return {
        "normal": normal,
        "uniform": uniform,
        "Laplace": torch.empty(SHAPE).exponential_(generator=drawn) * torch.sign(uniform),
        "t(4)": torch.randn(SHAPE, generator=drawn) / torch.sqrt(chi / 4),
        "lognormal": torch.exp(2 * torch.randn(SHAPE, generator=drawn)) * torch.sign(normal),
    }


@cache
def outliers(factor: float) -> Tensor:
    """Return normally distributed numbers, 0.1 % of which are multiplied by `factor`; the others never change."""
    drawn = torch.Generator().manual_seed(7)
    x = torch.randn(SHAPE, generator=drawn)
    return torch.where(torch.rand(SHAPE, generator=drawn) < 0.001, factor * x, x)


def relative_mse(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).square().mean() / x.double().square().mean())


def error(x: Tensor, quantizer: str) -> float:
    """Return E(x − q(x))² / E x² for the quantizer q."""
    return relative_mse(x, fake_quantize(x, quantizer))


def positive(name: str) -> Array:
    """Return the positive values of a format in ascending order. name: as in kernels.formats, or int8 or int4."""
    if name in ("int8", "int4"):  # in units of their step
        return np.arange(1, TABLE[name].max_code + 1, dtype=np.float64)
    values = map(TABLE[name].decode, range(TABLE[name].max_code + 1))
    return np.array([value for value in values if value > 0])


def rotated(x: Tensor, signs: str = "te") -> Tensor:
    """Return x after the Hadamard transform of every 16 neighbours in a row. signs: te (fixed, random) or none."""
    return rotate(x, Quantizer.parse(f"e2m1:1x16:nvfp4:rht16:signs={signs}"), -1)


def scales(x: Tensor, quantizer: str) -> Tensor:
    """Return the E8M0 scale of each block that `encode` stores, as a matrix (rows of x, blocks of a row)."""
    stored = encode(x, quantizer).scales
    assert stored is not None
    return torch.exp2(stored.view(torch.uint8).double() - TABLE["e8m0"].bias).view(stored.shape)


def casts(table: str) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Return (format, our casts, printed casts) for each row of one of the second text's tables.

    The row `fp32` has the inputs. A number beyond a format's range becomes NaN, as in the text.
    """
    rows = paper("primer").table(table).rows
    x = torch.tensor([float(text) for text in rows[0].text])
    made = {row.id: x if row.id == "fp32" else fake_quantize(x, f"{row.id}:overflow=nan") for row in rows}
    return [(row.title, tuple(f"{value:.6g}" for value in made[row.id].tolist()), row.text) for row in rows]


@cache
def sum_errors(accumulator: str, distribution: str, length: int) -> Tensor:
    """Return the errors of a product of E4M3 matrices, divided by the root mean square of the exact result's row."""
    drawn = torch.Generator().manual_seed(length)
    draw = torch.rand if distribution == "uniform" else torch.randn
    a, b = (draw(shape, generator=drawn).to(E4M3) for shape in ((SIDE, length), (length, SIDE)))
    exact = a.double() @ b.double()
    return (product(a, b, accumulator).double() - exact) / exact.square().mean(1, keepdim=True).sqrt()


def mean_error(accumulator: str, distribution: str, length: int) -> tuple[float, float]:
    """Return the mean over rows of the root mean square of `sum_errors`, and half the width of its 95 % interval."""
    rows = sum_errors(accumulator, distribution, length).square().mean(1).sqrt()
    return float(rows.mean()), float(1.96 * rows.std() / SIDE**0.5)


def listed(values: Mapping[str, object], spec: str = "g") -> str:
    """Return "NAME VALUE, …" with each value in the given format. spec: as in an f-string."""
    return ", ".join(f"{name.upper() if name in TABLE else name} {value:{spec}}" for name, value in values.items())
