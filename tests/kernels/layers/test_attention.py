"""Compare attention with its reference and with double precision: on this processor, and on emulated AMX tiles."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from fewbits.kernels.backends import cpu
from fewbits.kernels.layers import attention as layer
from fewbits.kernels.layers.attention import causal_attention, fused_causal_attention
from fewbits.kernels.layers.library import is_compiled
from fewbits.kernels.reference import attention as reference
from tests.kernels.emulation import library_with_tiles
from tests.kernels.inputs import assert_same, generator
from tests.kernels.orders import ORDERS, tiles

# (batch, tokens, query heads, key and value heads, dimension of a head, rotated dimensions)
SHAPES = (
    (1, 1, 1, 1, 16, 16),
    (2, 31, 2, 1, 64, 32),
    (1, 32, 3, 3, 48, 0),
    (1, 33, 2, 2, 64, 64),
    (2, 64, 6, 2, 32, 8),
    (1, 65, 2, 1, 80, 20),
    (1, 97, 1, 1, 128, 64),
    (1, 130, 4, 2, 96, 96),
    (1, 40, 2, 1, 20, 10),
)


@pytest.fixture(scope="module", params=["library", "tiles"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with the compiled library, and with one that emulates AMX tiles in its matrix products."""
    if request.param == "library":
        if not is_compiled():
            pytest.skip("compares the compiled library with the reference")
        yield request.param
        return
    emulated = library_with_tiles("cpu_attention.cpp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "library", lambda: emulated)
        patch.setattr(layer, "threads", lambda elements: 1)
        yield request.param


def inputs(shape: tuple[int, ...], scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return q, k, v, the cosines and sines of the angles (None without rotation), and the gradient of the result."""
    batch, tokens, heads, kv_heads, size, rotated = shape
    g = generator(sum(shape))
    q, k, v, dy = (
        (scale * torch.randn(batch, tokens, n, size, generator=g)).bfloat16()
        for n in (heads, kv_heads, kv_heads, heads)
    )
    angles = 4 * torch.randn(tokens + 3, rotated // 2, generator=g)
    return q, k, v, torch.stack((angles.cos(), angles.sin()), -1) if rotated else None, dy


def error(got: Tensor, want: Tensor) -> float:
    return float(
        (got.detach().double() - want.detach().double()).norm() / want.detach().double().norm().clamp(min=1e-30)
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_those_of_the_definition_bit_for_bit(
    implementation: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = tiles if implementation == "tiles" else ORDERS[cpu.library().fb_attention_order()]
    monkeypatch.setattr(reference, "product", order)
    q, k, v, turns, dy = inputs(shape)
    want = reference.attention(q, k, v, turns)
    for one, other in zip(torch.ops.fewbits.attention(q, k, v, turns), want, strict=True):
        assert_same(one, other)
    got = torch.ops.fewbits.attention_backward(q, k, v, turns, *want, dy)
    for one, other in zip(got, reference.attention_backward(q, k, v, turns, *want, dy), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("shape", SHAPES[3:6], ids=str)
def test_fp16_is_closer_to_the_exact_values_than_bf16(shape: tuple[int, ...]) -> None:
    """Check that FP16's errors are below a third of BF16's: FP16 has three bits more, so they should be an eighth.

    Products that are summed in FP16 would lose this advantage.
    """
    q, k, v, turns, dy = inputs(shape)
    errors = {}
    for dtype in (torch.float16, torch.bfloat16):
        leaves = tuple(x.to(dtype).requires_grad_() for x in (q, k, v))
        wide = tuple(x.double().requires_grad_() for x in (q, k, v))
        y = layer.causal_attention(leaves[0], leaves[1], leaves[2], turns)
        want = exact(wide[0], wide[1], wide[2], turns)
        assert y.dtype == dtype
        gradients = torch.autograd.grad(y, leaves, dy.to(dtype))
        expected = torch.autograd.grad(want, wide, dy.double())
        errors[dtype] = [error(y, want), *(error(*pair) for pair in zip(gradients, expected, strict=True))]
    assert all(fp16 < bf16 / 3 for fp16, bf16 in zip(*errors.values(), strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_fused_tensor_gives_the_bits_of_its_parts(implementation: str, shape: tuple[int, ...]) -> None:
    q, k, v, turns, dy = inputs(shape)
    x, heads = torch.cat((q, k, v), 2), q.shape[2]
    y, log_sums = torch.ops.fewbits.attention(q, k, v, turns)
    for one, other in zip(torch.ops.fewbits.fused_attention(x, heads, turns), (y, log_sums), strict=True):
        assert_same(one, other)
    dx = torch.ops.fewbits.fused_attention_backward(x, heads, turns, y, log_sums, dy)
    assert_same(dx, torch.cat(torch.ops.fewbits.attention_backward(q, k, v, turns, y, log_sums, dy), 2))


def test_large_scores_and_a_token_that_sees_only_itself_are_exact(implementation: str) -> None:
    q, k, v, turns, _ = inputs((1, 70, 2, 1, 64, 64), scale=30.0)
    y, log_sums = torch.ops.fewbits.attention(q, k, v, turns)
    assert_same(y[:, 0], v[:, 0].repeat_interleave(2, 1))
    assert log_sums.isfinite().all()
    assert error(y, reference.attention(q, k, v, turns)[0]) < 1e-2


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (24, 8), (20, 10), (9, 4)])
def test_rotated_heads_of_a_fused_tensor(size: int, rotated: int, dtype: torch.dtype) -> None:
    """Check the operator for GPUs: values against the definition, gradients against torch's, in several layouts."""
    q, k, v, turns, _ = inputs((2, 21, 6, 2, size, rotated))
    x = torch.cat((q, k, v), 2).to(dtype)
    shifted = torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x)  # begins between multiples of 16 bytes
    for layout in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x.mT.contiguous().mT, shifted):
        leaf, plain = (layout.detach().requires_grad_() for _ in range(2))
        got = layer._rotated_of(leaf, 6, 2, turns)
        q, k, v = plain.split((6, 2, 2), 2)
        want = [reference.rotate(q, turns).to(dtype), reference.rotate(k, turns).to(dtype), v]
        dy = [y.detach().roll(1, -1).transpose(1, 2).contiguous().transpose(1, 2) for y in want]
        grads = [torch.autograd.grad(ys, t, dy)[0] for ys, t in ((got, leaf), (want, plain))]
        for one, other in zip((*got, grads[0]), (*want, grads[1]), strict=True):
            assert_same(one.detach(), other.detach())


def exact(q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None) -> Tensor:
    """Return attention in double precision; the rotation multiplies complex numbers."""
    if turns is not None:
        turn = torch.view_as_complex(turns.double())[: q.shape[1], None]
        q, k = (
            torch.cat(
                (
                    torch.view_as_real(
                        torch.view_as_complex(x[..., : 2 * turn.shape[-1]].unflatten(-1, (-1, 2)).contiguous()) * turn
                    ).flatten(-2),
                    x[..., 2 * turn.shape[-1] :],
                ),
                -1,
            )
            for x in (q, k)
        )
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,bkhe->bqhe", scores.masked_fill(future, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_values_and_gradients_are_near_double_precision(fused: bool, dtype: torch.dtype) -> None:
    q, k, v, turns, dy = inputs((2, 100, 4, 2, 64, 32))
    leaves = q, k, v = tuple(x.to(dtype).requires_grad_() for x in (q, k, v))
    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    y = fused_causal_attention(torch.cat(leaves, 2), 4, turns) if fused else causal_attention(q, k, v, turns)
    want = exact(wide[0], wide[1], wide[2], turns)
    grads = torch.autograd.grad(y, leaves, dy.to(dtype))
    assert y.dtype == dtype
    bound = 1e-2 if dtype == torch.bfloat16 else 2e-3
    for got, expected in zip((y, *grads), (want, *torch.autograd.grad(want, wide, dy.double())), strict=True):
        assert error(got, expected) < bound


def test_no_bit_depends_on_threads_or_strides() -> None:
    q, k, v, turns, dy = inputs((3, 50, 4, 2, 64, 64))

    def run(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> list[Tensor]:
        y, log_sums = torch.ops.fewbits.attention(q, k, v, turns)
        return [y, *torch.ops.fewbits.attention_backward(q, k, v, turns, y, log_sums, dy)]

    tensors = (q, k, v, dy)
    torch.set_num_threads(1)
    want = run(*tensors)
    torch.set_num_threads(3)
    results = [run(*tensors)]
    results += (run(*(x.transpose(a, b).contiguous().transpose(a, b) for x in tensors)) for a, b in ((1, 2), (1, 3)))
    for got, (one, other) in product(results, [(0, 0), (1, 1), (2, 2), (3, 3)]):
        assert_same(got[one], want[other])


def test_no_tokens_give_no_result() -> None:
    x = torch.zeros(2, 0, 6, 16, dtype=torch.bfloat16).requires_grad_()
    y = fused_causal_attention(x, 4)
    assert y.shape == (2, 0, 4, 16)
    y.sum().backward()
    assert x.grad is not None


def test_turns_of_another_shape_are_refused() -> None:
    q, k, v, _, _ = inputs((1, 9, 2, 1, 16, 0))
    for shape in ((8, 8, 2), (9, 9, 2), (9, 8, 1)):
        with pytest.raises(ValueError, match=r"turns are .*expected \[9 or more, at most 8, 2\]"):
            causal_attention(q, k, v, torch.zeros(shape))
