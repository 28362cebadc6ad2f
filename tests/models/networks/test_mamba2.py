"""Check that Mamba-2's algorithm in chunks gives the same values and gradients as the recurrence token by token."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fewbits.models.networks.mamba2 import Mamba2, causal_conv, running_sum, ssd, sum_by_doubling
from fewbits.models.networks.registry import build
from tests.effort import examples
from tests.models.oracles import small


class Inputs(NamedTuple):
    x_BTHP: Tensor
    dt_BTH: Tensor
    a_H: Tensor
    b_BTGN: Tensor
    c_BTGN: Tensor


def draw(tokens: int, heads: int = 4, groups: int = 2, state: int = 3, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)
    x, dt, a, b, c = (
        torch.randn(shape, generator=generator, dtype=dtype)
        for shape in (
            (2, tokens, heads, 5),
            (2, tokens, heads),
            (heads,),
            (2, tokens, groups, state),
            (2, tokens, groups, state),
        )
    )
    return Inputs(x, dt.exp() * 0.1, -a.exp(), b, c)


def recurrence(x_BTHP: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTGN: Tensor, c_BTGN: Tensor) -> Tensor:
    """Compute S_t = exp(Δ_t·a)·S_{t−1} + Δ_t·B_t x_tᵀ and y_t = S_tᵀ C_t, token by token."""
    shared = x_BTHP.shape[2] // b_BTGN.shape[2]
    b_BTHN, c_BTHN = (y.repeat_interleave(shared, 2) for y in (b_BTGN, c_BTGN))
    state, ys = torch.zeros(1), []
    for t in range(x_BTHP.shape[1]):
        added = torch.einsum("bh,bhn,bhp->bhnp", dt_BTH[:, t], b_BTHN[:, t], x_BTHP[:, t])
        state = state * (dt_BTH[:, t] * a_H).exp()[..., None, None] + added
        ys.append(torch.einsum("bhn,bhnp->bhp", c_BTHN[:, t], state))
    return torch.stack(ys, 1)


@examples(30)
@given(tokens=st.integers(1, 40), chunk=st.integers(1, 24), groups=st.sampled_from([1, 2, 4]), state=st.integers(1, 4))
def test_chunks_of_any_size_compute_the_recurrence(tokens: int, chunk: int, groups: int, state: int) -> None:
    inputs = draw(tokens, groups=groups, state=state)
    torch.testing.assert_close(ssd(*inputs, chunk=chunk), recurrence(*inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_gradients_in_chunks_are_those_of_the_recurrence(chunk: int) -> None:
    inputs = Inputs(*(y.requires_grad_() for y in draw(40)))
    weight = torch.randn(2, 40, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    in_chunks = torch.autograd.grad((ssd(*inputs, chunk=chunk) * weight).sum(), inputs)
    expected = torch.autograd.grad((recurrence(*inputs) * weight).sum(), inputs)
    for ours, theirs in zip(in_chunks, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_decays_too_strong_for_fp32_neither_overflow_nor_spoil_gradients() -> None:
    """Check decays for which exp(s_i − s_j), with running sums s of Δ·a, overflows in FP32 for masked tokens j > i."""
    inputs = draw(150, dtype=torch.float32)
    inputs = inputs._replace(a_H=torch.full((4,), -400.0), dt_BTH=inputs.dt_BTH + 1)
    strong = Inputs(*(y.requires_grad_() for y in inputs))
    y = ssd(*strong)
    torch.testing.assert_close(y, recurrence(*strong))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), strong))


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_the_convolution_is_torchs_depthwise_one_that_sees_no_later_token(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((2, tokens, 6), (4, 6), (6,))
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    x, weight, bias = inputs
    expected = F.conv1d(F.pad(x.mT, (3, 0)), weight.T[:, None], bias, groups=6).mT
    torch.testing.assert_close(causal_conv(*inputs), expected)
    cotangent = torch.randn(expected.shape, generator=generator)
    ours = torch.autograd.grad((causal_conv(*inputs) * cotangent).sum(), inputs)
    theirs = torch.autograd.grad((expected * cotangent).sum(), inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_linear_layers_compute_in_bf16_and_all_between_in_fp32() -> None:
    config = small("hybrid-8b", layers=1, pattern="M", mamba_groups=2, mamba_state=8, mamba_head_dim=16)
    mixer, seen = build(config, seed=1).blocks[0].mamba, []
    assert isinstance(mixer, Mamba2)
    for linear in (mixer.in_proj, mixer.out_proj):
        linear.register_forward_hook(lambda linear, args, output: seen.append((args[0].dtype, output.dtype)))
    x = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(0))
    y = mixer(x.bfloat16())
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
    torch.testing.assert_close(y.float(), mixer(x), rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("size", [1, 2, 5, 64, 100])
def test_running_sums_without_cumsum(size: int) -> None:
    """Check `sum_by_doubling` on whole numbers, whose sums are exact, and its gradient, a running sum from the end."""
    x = torch.randint(-100, 100, (3, 2, size), generator=torch.Generator().manual_seed(size)).double().requires_grad_()
    y = sum_by_doubling(x)
    assert torch.equal(y, x.cumsum(-1))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(dx, torch.arange(size, 0, -1).double().expand_as(x))


@pytest.mark.parametrize("deterministic", [True, False])
def test_cumsum_is_not_used_on_a_gpu_where_determinism_is_on(deterministic: bool) -> None:
    used = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            used.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        with FakeTensorMode(), Watch():
            running_sum(torch.empty(2, 64, device="cuda"))
            assert ("cumsum" in used) != deterministic
            running_sum(torch.empty(2, 64))
            assert "cumsum" in used
    finally:
        torch.use_deterministic_algorithms(before)
