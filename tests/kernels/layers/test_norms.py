"""Compare the norms with their reference bit for bit, and with double precision within bounds."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fewbits.kernels.layers import norms
from fewbits.kernels.reference import layers as reference
from tests.kernels.inputs import assert_same, generator

EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((1, 1), (1, 16), (3, 15), (5, 17), (64, 48), (65, 256), (2, 33, 100), (4100, 3), (0, 8))


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(shape, generator=generator(seed)) + 0.5).to(dtype)


def compare(got: tuple[Tensor, ...], want: tuple[Tensor, ...], what: str) -> None:
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        assert_same(one, other, f"{what}, result {i}")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_bit_is_that_of_the_definition(shape: tuple[int, ...]) -> None:
    for dtype, centered, biased, added in product(DTYPES, (True, False), (True, False), (True, False)):
        x, y, dn, ds = (normal(*shape, seed=seed, dtype=dtype) for seed in range(4))
        weight, bias = normal(shape[-1], seed=5), normal(shape[-1], seed=6) if biased else None
        settings, what = (1.0, EPS, centered), f"{dtype}, {centered=}, {biased=}, {added=}"
        if added:
            s, *got = torch.ops.fewbits.add_norm(x, y, weight, bias, *settings)
            assert_same(s, x + y, what)
        else:
            s, got = x, list(torch.ops.fewbits.norm(x, weight, bias, *settings, dtype))
        want = reference.norm(s, weight, bias, *settings, dtype)
        compare(tuple(got), want, f"forward, {what}")
        arguments = (s, ds if added else None, dn, weight, biased, *want[1:], 1.0, centered)
        compare(torch.ops.fewbits.norm_backward(*arguments), reference.norm_backward(*arguments), f"backward, {what}")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_have_weights_of_their_own_and_a_result_of_another_dtype(dtype: torch.dtype) -> None:
    x, weight, dn = normal(5, 7, 3, 20, seed=1), normal(3, 20, seed=2), normal(5, 7, 3, 20, seed=3, dtype=dtype)
    want = reference.norm(x, weight, None, 0.0, EPS, False, dtype)
    compare(torch.ops.fewbits.norm(x, weight, None, 0.0, EPS, False, dtype), want, "forward")
    arguments = (x, None, dn, weight, False, *want[1:], 0.0, False)
    compare(torch.ops.fewbits.norm_backward(*arguments), reference.norm_backward(*arguments), "backward")


def test_no_bit_depends_on_threads_or_on_the_layout_in_memory() -> None:
    def run(x: Tensor, y: Tensor, dn: Tensor) -> list[Tensor]:
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        weight, bias = normal(200, seed=1).requires_grad_(), normal(200, seed=2).requires_grad_()
        s, n = norms.add_norm(x, y, weight, bias, eps=EPS, centered=True)
        return [n, *torch.autograd.grad((s, n), (x, y, weight, bias), (dn, dn))]

    x, y, dn = (normal(300, 200, seed=seed, dtype=torch.bfloat16) for seed in (3, 4, 5))
    torch.set_num_threads(1)
    want = run(x, y, dn)
    torch.set_num_threads(3)
    compare(tuple(run(x, y, dn)), tuple(want), "three threads")
    compare(tuple(run(*(t.t().contiguous().t() for t in (x, y, dn)))), tuple(want), "transposed")


def exact(s: Tensor, weight: Tensor, bias: Tensor, centered: bool, offset: float) -> Tensor:
    v = s - s.mean(-1, keepdim=True) if centered else s
    return v / (v.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight + offset) + bias


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_gradients_are_those_of_double_precision(dtype: torch.dtype, centered: bool) -> None:
    """Check bounds: results in x's dtype are rounded once; FP32 sums over 1,000 rows are accurate to some units."""
    x, y, ds, dn = (normal(1000, 96, seed=seed, dtype=dtype) for seed in range(4))
    weight, bias = normal(96, seed=5), normal(96, seed=6)
    leaves = [t.requires_grad_() for t in (x, y, weight, bias)]
    s, n = norms.add_norm(x, y, weight, bias, eps=EPS, centered=centered, offset=1.0)
    grads = torch.autograd.grad((s, n), leaves, (ds, dn))

    wide = [t.detach().double().requires_grad_() for t in (s, weight, bias)]
    want_n = exact(wide[0], wide[1], wide[2], centered, 1.0)
    ds_through_norm, *want = torch.autograd.grad(want_n, wide, dn.double())
    rounding = torch.finfo(dtype).eps / 2
    for got, expected, bound in (
        (n, want_n, rounding),
        (grads[0], ds_through_norm + ds.double(), rounding),
        (grads[2], want[0], 0),
        (grads[3], want[1], 0),
    ):
        error = (got.double() - expected).norm() / expected.norm()
        assert error <= bound + 2e-6, error
    assert_same(grads[0], grads[1])


def test_a_norm_without_its_second_result_or_without_the_sum_has_the_gradient_of_the_other() -> None:
    x, y = (normal(6, 40, seed=seed).requires_grad_() for seed in (1, 2))
    weight = normal(40, seed=3).requires_grad_()

    def gradients(use: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(use(*norms.add_norm(x, y, weight, eps=EPS, centered=False)).sum(), (x, y, weight))

    whole, only_s, only_n = (
        gradients(use) for use in (lambda s, n: 3 * s + n, lambda s, n: 3 * s + 0 * n, lambda s, n: n)
    )
    for total, *parts in zip(whole, only_s, only_n, strict=True):
        torch.testing.assert_close(sum(parts), total)
