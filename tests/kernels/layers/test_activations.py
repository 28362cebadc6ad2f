"""Compare the activations with their reference bit for bit, and with double precision within bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.layers.activations import gelu, squared_relu, swiglu
from fewbits.kernels.reference import layers as reference
from fewbits.kernels.reference.functions import exponential
from tests.kernels.inputs import assert_same, generator

DTYPES = (torch.bfloat16, torch.float32)
SPECIAL = [0.0, -0.0, 1e-40, -1e-40, 1e-30, 88.8, -88.8, -104.5, 1e30, -1e30, 3e38, math.inf, -math.inf, math.nan]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (4 * torch.randn(shape, generator=generator(seed))).to(dtype)


def hard(count: int, seed: int, dtype: torch.dtype) -> Tensor:
    x = normal(count, seed=seed, dtype=dtype)
    special = torch.tensor(SPECIAL, dtype=dtype)[: count // 2]
    x[torch.randperm(count, generator=generator(seed))[: len(special)]] = special
    return x


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 33, 5000, 70001])
def test_every_bit_is_that_of_the_definition(count: int, dtype: torch.dtype) -> None:
    x, up, dy = (hard(count, seed, dtype) for seed in range(3))
    assert_same(torch.ops.fewbits.squared_relu(x), reference.squared_relu(x))
    assert_same(torch.ops.fewbits.squared_relu_backward(x, dy), reference.squared_relu_backward(x, dy))
    assert_same(torch.ops.fewbits.gelu(x), reference.gelu(x))
    assert_same(torch.ops.fewbits.gelu_backward(x, dy), reference.gelu_backward(x, dy))
    assert_same(torch.ops.fewbits.swiglu(x, up), reference.swiglu(x, up))
    for got, want in zip(
        torch.ops.fewbits.swiglu_backward(x, up, dy), reference.swiglu_backward(x, up, dy), strict=True
    ):
        assert_same(got, want)


def test_the_exponential_is_exact_to_two_units_everywhere() -> None:
    """Check that e^x is within two units of the last place (of 2^-149 if subnormal), and its values 0, inf and NaN."""
    x = torch.cat((torch.linspace(-110, 95, 400_001), torch.tensor(SPECIAL)))
    got, want = exponential(x), x.double().exp()
    step = torch.maximum(want * 2**-23, torch.tensor(2.0**-149, dtype=torch.float64))
    inside = want < 3.4e38
    assert ((got.double() - want).abs() <= 2 * step)[inside].all()
    assert got[(x > 89) | (x == math.inf)].isinf().all()
    assert (got[x < -104] == 0).all()
    assert got[x.isnan()].isnan().all()


@pytest.mark.usefixtures("compiled")
def test_gelu_is_exact_also_where_it_is_small() -> None:
    x = torch.linspace(-12, 12, 100_001)
    want = x.double() * torch.special.erfc(-x.double() / 2**0.5) / 2
    assert ((torch.ops.fewbits.gelu(x).double() - want).abs() <= 2e-5 * want.abs() + 1e-36).all()


CASES: dict[str, tuple[int, Callable[..., Tensor], Callable[..., Tensor]]] = {
    "squared ReLU": (1, squared_relu, lambda x: F.relu(x).square()),
    "GELU": (1, gelu, F.gelu),
    "SwiGLU": (2, swiglu, lambda gate, up: F.silu(gate) * up),
}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_values_and_gradients_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    """Compare with double precision; a result is rounded once, from a value that is accurate to some units of FP32."""
    count, ours, theirs = CASES[name]
    inputs = [normal(3, 700, seed=seed, dtype=dtype).requires_grad_() for seed in range(count)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    dy = normal(3, 700, seed=9, dtype=dtype)
    y, want = ours(*inputs), theirs(*wide)
    results = [(y, want)]
    results += zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(want, wide, dy.double()), strict=True)
    bound = torch.finfo(dtype).eps / 2 + (0 if dtype == torch.float64 else 2e-6)
    for got, expected in results:
        assert got.dtype == dtype
        assert ((got.double() - expected).abs() <= bound * expected.abs() + 2e-6 * expected.abs().max()).all()


@pytest.mark.usefixtures("compiled")
def test_operands_of_other_layouts_give_the_same_bits() -> None:
    gate, up = normal(48, 64, seed=1, dtype=torch.bfloat16), normal(48, 64, seed=2, dtype=torch.bfloat16)
    transposed = [x.t().contiguous().t() for x in (gate, up)]
    assert_same(swiglu(*transposed), swiglu(gate, up))
    assert_same(squared_relu(transposed[0]), squared_relu(gate))
