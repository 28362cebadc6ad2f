"""Test the FP32 product of BF16 matrices: its values, its order of additions, layouts and threads (arithmetic.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from fewbits.kernels import products
from fewbits.kernels.backends import cpu, reference
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.products import matmul_fp32
from tests.kernels.emulation import library_with_tiles
from tests.kernels.inputs import assert_same, generator, grad_of, make
from tests.kernels.orders import ORDERS, tiles

# Sizes around tiles (8 x 32 and 32 x 32), the transposition (16 pairs), and blocks (K of 256 and 512, N of up to 1024).
SIZES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 64, 97)
DEPTHS = (1, 2, 3, 16, 31, 32, 33, 101, 511, 512, 513, 1025)
LONG = ((1030, 40, 70), (40, 1030, 70), (1025, 1057, 33))

Layout = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, Layout] = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.t().contiguous().t(),
    "part of rows": lambda x: _inside(x),
    "part of columns": lambda x: _inside(x.t()).t(),
    "neither": lambda x: _inside(x.repeat_interleave(2, 1))[:, ::2],
}

ORDERED = backend_for("cpu") is not reference
exact_order = pytest.mark.skipif(not ORDERED, reason="the product is torch's here, which promises no order")


def _inside(x: Tensor) -> Tensor:
    """Return x as a part of a larger matrix that is NaN elsewhere: a read beyond x's edges would change the result."""
    larger = x.new_full((x.shape[0] + 2, x.shape[1] + 3), float("nan"))
    larger[1:-1, 2:-1] = x
    return larger[1:-1, 2:-1]


def pair(m: int, n: int, k: int, kind: str = "normal") -> tuple[Tensor, Tensor]:
    return make(kind, (m, k), torch.bfloat16, seed=k), make(kind, (k, n), torch.bfloat16, seed=n + 1)


def assert_close(got: Tensor, a: Tensor, b: Tensor) -> None:
    """Check that `got` is a·b within γ(k) · Σ|a||b|, the error bound of a sum of k products in FP32 in any order.

    γ(k) = k·2^-24 / (1 − k·2^-24). Subnormal numbers may count as zero.
    """
    assert got.dtype == torch.float32
    k = a.shape[1]
    a64, b64 = a.double(), b.double()
    normal_a, normal_b = (torch.where(x.abs() < torch.finfo(torch.bfloat16).tiny, 0, x) for x in (a64, b64))
    magnitudes = a64.abs() @ b64.abs()
    lost = magnitudes - normal_a.abs() @ normal_b.abs()
    gamma = k * 2.0**-24 / (1 - k * 2.0**-24)
    bound = gamma * magnitudes + lost + 2 * k * torch.finfo(torch.float32).tiny
    excess = (got.double() - a64 @ b64).abs() - bound - 1e-12 * magnitudes  # the last term: errors of float64
    assert not bool((excess > 0).any())


@pytest.fixture(scope="module", params=["library", "tiles"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test twice: with the library's code for this processor, and with its AMX code on emulated tiles."""
    if request.param == "library":
        yield request.param
        return
    emulated = library_with_tiles("cpu_gemm.cpp")
    emulated.fb_matmul_fp32.argtypes = cpu.library().fb_matmul_fp32.argtypes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "library", lambda: emulated)
        yield request.param


# Values


def test_every_ragged_shape_is_within_the_bound_of_a_float32_sum(implementation: str) -> None:
    for i, (m, n) in enumerate(product(SIZES, SIZES)):
        k = DEPTHS[i % len(DEPTHS)]
        a, b = pair(m, n, k)
        left, right = list(LAYOUTS.values())[i % 5], list(LAYOUTS.values())[i // 5 % 5]
        assert_close(matmul_fp32(left(a), right(b)), a, b)


@pytest.mark.parametrize(("left", "right"), list(product(LAYOUTS, LAYOUTS)))
def test_layouts_change_no_bit(implementation: str, left: str, right: str) -> None:
    for m, n, k in ((33, 47, 513), (8, 32, 64), (1, 65, 37), (65, 1, 37), (5, 5, 1)):
        a, b = pair(m, n, k)
        got = matmul_fp32(LAYOUTS[left](a), LAYOUTS[right](b))
        assert got.is_contiguous()
        assert_close(got, a, b)
        if ORDERED:
            assert_same(got, matmul_fp32(a, b), f"{m=} {n=} {k=}")


@pytest.mark.parametrize(("m", "n", "k"), LONG)
def test_more_than_a_block_is_within_the_bound(m: int, n: int, k: int) -> None:
    a, b = pair(m, n, k)
    assert_close(matmul_fp32(a, b), a, b)
    assert_close(matmul_fp32(LAYOUTS["columns"](a), LAYOUTS["columns"](b)), a, b)


@pytest.mark.parametrize("kind", ["lognormal", "sparse", "ties", "tiny", "subnormal", "zeros", "negative zeros"])
def test_only_subnormals_may_be_lost(kind: str) -> None:
    for m, n, k in ((9, 33, 65), (17, 5, 600)):
        a, b = pair(m, n, k, kind)
        assert_close(matmul_fp32(a, b), a, b)
        assert_close(matmul_fp32(a, pair(m, n, k)[1]), a, pair(m, n, k)[1])


def test_integers_whose_sums_fit_are_exact() -> None:
    for m, n, k in ((33, 65, 1025), (256, 40, 2000), (3, 3, 7)):
        g = generator(k)
        a = torch.randint(-64, 65, (m, k), generator=g)
        b = torch.randint(-64, 65, (k, n), generator=g)
        for left, right in product(("rows", "columns"), repeat=2):
            got = matmul_fp32(LAYOUTS[left](a.bfloat16()), LAYOUTS[right](b.bfloat16()))
            assert torch.equal(got.long(), a @ b)


@pytest.mark.parametrize(("left", "right"), list(product(("rows", "columns"), repeat=2)))
def test_nan_and_infinity_go_where_they_should_and_nowhere_else(left: str, right: str) -> None:
    for m, n, k in ((9, 33, 65), (1, 1, 1), (8, 32, 2), (17, 70, 515)):
        a, b = pair(m, n, k)
        for bad, (i, p, j) in product((float("nan"), float("inf"), -float("inf")), ((0, 0, 0), (m - 1, k - 1, n - 1))):
            x, y = a.clone(), b.clone()
            x[i, p] = bad
            y[p, :: max(1, n - 1)] = 0  # infinity times zero is NaN
            for u, v in ((x, b), (x, y), (a, b.index_put((torch.tensor(p), torch.tensor(j)), b.new_tensor(bad)))):
                want = (u.double() @ v.double()).float()
                got = matmul_fp32(LAYOUTS[left](u), LAYOUTS[right](v))
                assert torch.equal(got.isnan(), want.isnan())
                assert torch.equal(got.isinf(), want.isinf())
                assert torch.equal(got[want.isinf()], want[want.isinf()])
                assert_close(got[want.isfinite().all(1)], u[want.isfinite().all(1)], v.where(v.isfinite(), 0))


def test_a_sum_beyond_float32_is_infinite() -> None:
    a = torch.full((3, 4), 2.0**100, dtype=torch.bfloat16)
    assert bool((matmul_fp32(a, a.t()) == float("inf")).all())
    assert bool((matmul_fp32(-a, a.t()) == -float("inf")).all())


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0), (0, 0, 7)])
def test_an_empty_sum_is_zero(m: int, n: int, k: int) -> None:
    for left, right in product(("rows", "columns"), repeat=2):
        a, b = torch.ones(m, k, dtype=torch.bfloat16), torch.ones(k, n, dtype=torch.bfloat16)
        assert_same(matmul_fp32(LAYOUTS[left](a), LAYOUTS[right](b)), torch.zeros(m, n))


# Order


@exact_order
def test_products_are_added_in_the_written_order(implementation: str) -> None:
    ordered = ORDERS[cpu.library().fb_matmul_order()]
    assert (ordered is tiles) >= (implementation == "tiles")
    for m, n, k in ((9, 40, 1), (9, 40, 2), (21, 37, 1025), (70, 33, 600)):
        g = generator(k)
        a, b = (
            torch.randint(128, 256, shape, generator=g) * 2.0 ** torch.randint(-4, 5, shape, generator=g) * 2.0**-7
            for shape in ((m, k), (k, n))
        )
        a = a * (torch.randint(0, 2, (m, k), generator=g) * 2 - 1)
        assert_same(matmul_fp32(a.bfloat16(), b.bfloat16()), ordered(a, b))


@exact_order
@pytest.mark.parametrize(("m", "n", "k"), [(300, 200, 601), (64, 1100, 300), (1100, 33, 129), (256, 256, 2048)])
def test_threads_change_no_bit(m: int, n: int, k: int) -> None:
    for left, right in (("rows", "columns"), ("columns", "rows")):
        a, b = pair(m, n, k, "lognormal")
        a, b = LAYOUTS[left](a), LAYOUTS[right](b)
        torch.set_num_threads(1)
        want = matmul_fp32(a, b)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert_same(matmul_fp32(a, b), want, f"{count} threads")


@exact_order
def test_an_element_depends_on_its_row_and_column_alone() -> None:
    a, b = pair(100, 90, 700)
    whole = matmul_fp32(a, b)
    for rows, columns in ((slice(0, 1), slice(None)), (slice(13, 60), slice(5, 6)), (slice(99, 100), slice(40, 90))):
        assert_same(matmul_fp32(a[rows], b[:, columns]), whole[rows, columns])


# In linear layers


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 7), (0, 7)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_linear_layer_is_that_of_float32_and_keeps_its_operands_narrow(
    shape: tuple[int, ...], biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "WIDENS", True)
    g = generator(3)
    made = (torch.randn(shape, generator=g), torch.randn(4, 7, generator=g), torch.randn(4, generator=g))
    leaves = [t.to(dtype).requires_grad_() for t in made[: 3 if biased else 2]]
    wide = [t.detach().float().requires_grad_() for t in leaves]
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = products.linear(*leaves)
    want = torch.nn.functional.linear(*wide)
    assert_same(y, want.to(dtype))
    assert {t.dtype for t in kept} == {dtype}
    dy = torch.randn(y.shape, generator=g).to(dtype)
    for got, expected in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, wide, dy.float()), strict=True
    ):
        assert_same(got, expected.to(dtype))


def test_fp16_products_are_summed_in_fp32() -> None:
    """Check sums that FP16 would compute wrongly in every order, for example because 2048 + 1 = 2048 in FP16."""
    a, b = torch.ones(1, 1025, dtype=torch.float16), torch.ones(1025, 1, dtype=torch.float16)
    a[0, 0] = 2048 + 2048
    assert products.matmul(a, b).item() == 4096 + 1024
    assert products.linear(a, b.t().contiguous()).item() == 4096 + 1024
    b[1:] = 2.0**-12
    assert products.matmul(a, b).item() == 4096
    a[0, 0] = 1
    assert products.matmul(a, b).item() == 1.25


# As a torch operator


def test_the_result_is_float32_whatever_the_default() -> None:
    a, b = pair(9, 33, 65)
    want = matmul_fp32(a, b)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(matmul_fp32(a, b), want)
        assert matmul_fp32(a[:, :0], b[:0]).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_inputs_of_other_kinds_are_widened() -> None:
    a, b = torch.randn(7, 20, generator=generator(0)), torch.randn(20, 9, generator=generator(1))
    for x, y in ((a, b), (a.half(), b.half()), (a.bfloat16(), b), (a, b.bfloat16()), (a.bfloat16(), b.half())):
        assert_same(matmul_fp32(x, y), x.float() @ y.float())
    assert matmul_fp32(a.bfloat16().to("meta"), b.bfloat16().to("meta")).shape == (7, 9)


@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3,), (3, 4)), ((2, 3, 4), (4, 5)), ((0, 4), (5, 0))])
def test_shapes_that_do_not_meet_are_refused(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    with pytest.raises(ValueError, match=r"valid shapes are \[M, K\] and \[K, N\]"):
        matmul_fp32(a, b)


def test_the_gradient_is_that_of_the_widened_product() -> None:
    a, b = pair(9, 17, 33)
    grad = torch.randn(9, 17, generator=generator(5))
    leaves = [x.clone().requires_grad_() for x in (a, b)]
    matmul_fp32(*leaves).backward(grad)
    wanted = [x.clone().requires_grad_() for x in (a, b)]
    (wanted[0].float() @ wanted[1].float()).backward(grad)
    for leaf, want in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(grad_of(leaf), want.grad)
