"""Test FP8 products: exact for small integers, otherwise products of the decoded operands up to rounding errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.kernels.fp8_products import encode_fp8, is_executable, scaled_product
from fewbits.kernels.packed import decode, encode
from fewbits.kernels.quantizer import Quantizer

U = 2.0**-8  # the largest relative error of rounding to BF16
DTYPES = {torch.bfloat16: U, torch.float32: 2.0**-20, torch.float16: 2.0**-11}  # dtype -> a bound of its last rounding
BLOCKS = [("tensor", "tensor"), ("channel", "channel"), ("tensor", "channel"), ("channel", "tensor")]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def amax(block: str) -> str:
    return f"e4m3:{block}:amax"


@pytest.mark.parametrize("blocks", BLOCKS, ids=" x ".join)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_the_decoded_operands_within_the_bound(
    blocks: tuple[str, str], source: torch.dtype, dtype: torch.dtype
) -> None:
    rows, inner, cols = 37, 64, 48
    x, w = (normal(n, inner, seed=n).to(source) for n in (rows, cols))
    bias = normal(cols, seed=1).bfloat16()
    q, r = map(amax, blocks)
    a, b = (decode(encode(t, spec)).double() for t, spec in ((x, q), (w, r)))
    operands = 2 * U + U * U if source == torch.bfloat16 else 2.0**-20  # decode rounds to the source's dtype
    magnitude = a.abs() @ b.abs().t() * (1 + 2 * U) + bias.double().abs()
    for added in (None, bias):
        y = scaled_product(encode_fp8(x, q, -1, 0), encode_fp8(w, r, -1, 0).t(), dtype, added)
        exact = a @ b.t() + (0 if added is None else added.double())
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= magnitude * (operands + DTYPES[dtype])).all()


@pytest.mark.parametrize("block", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_small_integers_are_exact(block: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-8, 9, (n, 64), generator=g).float() for n in (32, 48))
    for t in (x, w):
        t[:, 0] = 448  # E4M3's largest value: the scale is 1, and all integers up to 16 have codes
    q = amax(block)
    y = scaled_product(encode_fp8(x, q, -1, 0), encode_fp8(w, q, -1, 0).t(), dtype)
    assert torch.equal(y, (x @ w.t()).to(dtype))


def test_operands_may_lie_in_memory_by_rows_or_by_columns() -> None:
    """Check that operands which are transposed in memory, as in wgrad, give the same bits as contiguous copies."""
    dy, x = normal(64, 32, seed=0).bfloat16(), normal(64, 48, seed=1).bfloat16()
    q = amax("channel")
    direct = scaled_product(encode_fp8(dy, q, 0, 0).t(), encode_fp8(x, q, 0, 0), torch.float32)
    copied = scaled_product(
        encode_fp8(dy.t().contiguous(), q, -1, 0), encode_fp8(x.t().contiguous(), q, -1, 0).t(), torch.float32
    )
    assert torch.equal(direct, copied)


def test_a_block_that_is_not_finite_makes_its_results_nan() -> None:
    x, w, q = normal(32, 64, seed=0), normal(48, 64, seed=1), amax("channel")
    x[3, 5] = torch.inf
    y = scaled_product(encode_fp8(x, q, -1, 0), encode_fp8(w, q, -1, 0).t(), torch.bfloat16)
    assert y[3].isnan().all()
    assert y[torch.arange(32) != 3].isfinite().all()


@pytest.mark.parametrize(("inner", "cols"), [(40, 48), (64, 40)])
def test_sizes_that_gpus_cannot_multiply_are_refused_everywhere(inner: int, cols: int) -> None:
    x, w, q = normal(32, inner, seed=0), normal(cols, inner, seed=1), amax("channel")
    with pytest.raises(ValueError, match="multiples of 16"):
        scaled_product(encode_fp8(x, q, -1, 0), encode_fp8(w, q, -1, 0).t(), torch.bfloat16)


def test_only_e4m3_with_whole_tensors_or_channels_and_amax_is_executable() -> None:
    valid = ("e4m3:tensor:amax", "e4m3:channel:amax", "e4m3:channel:amax:stochastic")
    others = ("e5m2:tensor:amax", "e4m3:128x128:amax", "e4m3:1x32:mx", "e4m3:tensor:gam", "e4m3", "bf16")
    assert all(is_executable(Quantizer.parse(text)) for text in valid)
    assert not any(is_executable(Quantizer.parse(text)) for text in others)
    assert not is_executable(None)
