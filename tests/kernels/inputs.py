"""Provide adversarial matrices by name, and an exact comparison of tensors, for all tests of kernels.

The name, shape, dtype and seed determine a matrix. Matrices whose names are in `FINITE` have no NaN or infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Generator, Tensor

from fewbits.kernels.formats import TABLE
from fewbits.kernels.quantizer import Block
from fewbits.kernels.scalings import GROUP_SIZES, SCALINGS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ODD = ((1, 1), (1, 17), (64, 1), (3, 5), (16, 16), (7, 33), (33, 130), (5, 300), (300, 5), (129, 127))
EMPTY = ((0, 5), (5, 0), (0, 0))

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TOPS = (6.0, 448.0, 57344.0, 28.0, 7.5)  # the largest values of e2m1, e4m3, e5m2, e3m2, e2m3


def make(name: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return the matrix with this name (a key of KINDS); for names in FINITE it is finite in every dtype."""
    rows, cols = shape
    x = KINDS[name](rows, cols, dtype, generator(seed))
    if name in FINITE and x.dtype != dtype:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def generator(seed: int) -> Generator:
    return torch.Generator().manual_seed(seed)


def bits(x: Tensor) -> Tensor:
    """Return the bits of floats as integers, with the same integer for every NaN."""
    if not x.is_floating_point():
        return x
    return torch.where(x.isnan(), -1, x.contiguous().view(_WORDS[x.element_size()]).long())  # all ones is a NaN


def same(got: Tensor, want: Tensor) -> bool:
    """Tell whether tensors are equal bit for bit: −0.0 differs from 0.0, and every NaN equals every other NaN."""
    return got.dtype == want.dtype and got.shape == want.shape and bool((bits(got) == bits(want)).all())


def assert_same(got: Tensor, want: Tensor, what: str = "") -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    differ = bits(got) != bits(want)
    if bool(differ.any()):
        at = [tuple(i) for i in differ.nonzero()[:3].tolist()]
        shown = [f"at {i} got {got[i].item()!r}, want {want[i].item()!r}" for i in at]
        raise AssertionError(f"{what}: {int(differ.sum())} of {got.numel()} differ: {'; '.join(shown)}")


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


# Each function takes rows, cols, the dtype and a generator.


def _normal(r: int, c: int, _: torch.dtype, g: Generator) -> Tensor:
    return torch.randn(r, c, generator=g)


def _lognormal(r: int, c: int, _: torch.dtype, g: Generator) -> Tensor:
    return torch.randn(r, c, generator=g) * torch.randn(r, c, generator=g).mul(4).exp()


def _squared_relu(r: int, c: int, _: torch.dtype, g: Generator) -> Tensor:
    """Return the squared ReLU of Student-t values (3 degrees of freedom), like the input of FC2 in MoR."""
    chi_square = torch.randn(3, r, c, generator=g).square().sum(0)
    return (torch.randn(r, c, generator=g) * (3 / chi_square).sqrt()).relu().square()


def _ties(r: int, c: int, _: torch.dtype, g: Generator) -> Tensor:
    """Return many values that are ties: halfway between two neighbouring values of a low-precision format.

    In every eighth column, each row has the largest value of some format; then scales are often powers of two, which
    keep ties.
    """
    x = torch.randint(-64, 65, (r, c), generator=g) * 0.125 * 2.0 ** torch.randint(-3, 4, (r, c), generator=g)
    top = torch.tensor(_TOPS)[torch.randint(len(_TOPS), (r, 1), generator=g)]
    x = x.clamp(-top, top)
    x[:, ::8] = top
    return x


def _below_powers(r: int, c: int, dtype: torch.dtype, g: Generator) -> Tensor:
    powers = (2.0 ** torch.randint(-12, 13, (r, c), generator=g)).to(dtype)
    return (powers.view(_WORDS[dtype.itemsize]) - 1).view(dtype) * _signs(r, c, g).to(dtype)


def _subnormal(r: int, c: int, dtype: torch.dtype, g: Generator) -> Tensor:
    low, mantissa_bits = torch.finfo(dtype), round(-math.log2(torch.finfo(dtype).eps))
    steps = torch.randint(-(1 << mantissa_bits) + 1, 1 << mantissa_bits, (r, c), generator=g)
    return (steps.double() * (low.smallest_normal * low.eps)).to(dtype)


def _tiny(r: int, c: int, dtype: torch.dtype, g: Generator) -> Tensor:
    """Return values around the smallest normal number of the dtype."""
    return (torch.randn(r, c, generator=g).double() * torch.finfo(dtype).smallest_normal).to(dtype)


def _huge(r: int, c: int, dtype: torch.dtype, g: Generator) -> Tensor:
    """Return values up to the dtype's largest value; every seventh is 1e38 (or the largest value, if it is smaller)."""
    largest = torch.finfo(dtype).max
    x = (torch.randn(r, c, generator=g).clamp(-3, 3).double() * largest / 3).to(dtype)
    x[:, ::7] = min(1e38, largest)
    return x


def _sparse(r: int, c: int, _: torch.dtype, g: Generator) -> Tensor:
    """Return mostly zeros, half of them negative, so that some blocks contain only zeros."""
    kept = torch.rand(r, c, generator=g) < 0.02
    return torch.where(kept, torch.randn(r, c, generator=g), 0.0) * _signs(r, c, g)


def _zero_blocks(r: int, c: int, _: torch.dtype, g: Generator) -> Tensor:
    live = torch.rand(-(-r // 16), -(-c // 16), generator=g) < 0.5
    return torch.randn(r, c, generator=g) * live.repeat_interleave(16, 0)[:r].repeat_interleave(16, 1)[:, :c]


def _zeros(r: int, c: int, _: torch.dtype, g: Generator) -> Tensor:
    return torch.zeros(r, c)


def _negative_zeros(r: int, c: int, _: torch.dtype, g: Generator) -> Tensor:
    return -torch.zeros(r, c)


def _constant(r: int, c: int, _: torch.dtype, g: Generator) -> Tensor:
    return torch.full((r, c), 0.7)


def _wide(r: int, c: int, dtype: torch.dtype, g: Generator) -> Tensor:
    """Return random bit patterns, so that all exponents are equally likely; zeros replace NaN and infinities."""
    x = _patterns(r, c, dtype, g)
    return torch.where(x.isfinite(), x, 0)


def _patterns(r: int, c: int, dtype: torch.dtype, g: Generator) -> Tensor:
    top = 1 << 8 * dtype.itemsize - 1
    return torch.randint(-top, top, (r, c), generator=g).to(_WORDS[dtype.itemsize]).view(dtype)


def _one_bad(r: int, c: int, dtype: torch.dtype, g: Generator) -> Tensor:
    x = torch.randn(r, c, generator=g)
    if x.numel():
        bad = torch.tensor([math.nan, math.inf, -math.inf])[torch.randint(3, (), generator=g)]
        x.view(-1)[torch.randint(x.numel(), (), generator=g)] = bad
    return x


def _signs(r: int, c: int, g: Generator) -> Tensor:
    return torch.randint(0, 2, (r, c), generator=g) * 2.0 - 1


KINDS: dict[str, Callable[[int, int, torch.dtype, Generator], Tensor]] = {
    "normal": _normal,
    "lognormal": _lognormal,
    "squared relu": _squared_relu,
    "ties": _ties,
    "below powers of two": _below_powers,
    "subnormal": _subnormal,
    "tiny": _tiny,
    "huge": _huge,
    "sparse": _sparse,
    "zero blocks": _zero_blocks,
    "zeros": _zeros,
    "negative zeros": _negative_zeros,
    "constant": _constant,
    "wide": _wide,
    "bit patterns": _patterns,
    "one bad": _one_bad,
}
# The scalings that have compiled kernels and packed storage; only the reference computes `affine`.
COMPILED = tuple(name for name in SCALINGS if name != "affine")
FINITE = tuple(name for name in KINDS if name not in ("bit patterns", "one bad"))


def options(scaling: str, block: Block, largest: float) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for the options of a quantizer that depend on its scaling. largest: the format's value."""
    record = SCALINGS[scaling]
    factors = [one for one in (0.75, 16 / 17, 17 / 16) if one * largest <= TABLE["fp32"].max]
    sizes = [n for n in GROUP_SIZES[:5] if "N" in record.groups and block.cols and n % block.cols == 0]
    values: dict[str, list[Any]] = {
        "group": ["tensor", *[name for name in record.groups if name == "row"], *sizes],
        "factor": [1.0, *(factors if "factor" in record.options else [])],
        "target": [None, *([256.0, 448.0, 300.5] if "target" in record.options else [])],
        "select": [None, *(["mse", "mae", "max"] if "select" in record.options else [])],
    }
    return st.fixed_dictionaries({name: st.sampled_from(choices) for name, choices in values.items()})
