"""Check that `product` sums in FP32 and rounds a result only once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewbits.models.quantized_linear import product


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return dy [2000, 40] and x [2000, 33]; wgrad sums over their 2000 rows (tokens)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2000, 40, generator=generator).to(dtype), torch.randn(2000, 33, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_float32_result_keeps_what_its_operands_hold(dtype: torch.dtype) -> None:
    dy, x = operands(dtype)
    got = product("wgrad", dy, x, torch.float32)
    assert got.dtype == torch.float32
    bound = 2000 * 2.0**-24 * (dy.double().abs().t() @ x.double().abs())
    assert bool(((got.double() - dy.double().t() @ x.double()).abs() <= 1.01 * bound).all())


def test_a_result_in_the_operands_dtype_is_torchs() -> None:
    dy, x = operands(torch.bfloat16)
    assert torch.equal(product("wgrad", dy, x, torch.bfloat16), dy.t() @ x)


def test_another_dtype_is_rounded_once_from_float32() -> None:
    dy, x = operands(torch.float32)
    assert torch.equal(product("wgrad", dy, x, torch.bfloat16), product("wgrad", dy, x, torch.float32).bfloat16())
