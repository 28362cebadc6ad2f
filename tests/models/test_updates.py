"""Check that a cached cast of a weight is renewed after every kind of change of the weight."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fewbits.models.networks.layers import Linear
from fewbits.models.runtime import KeptCast
from tests.kernels.inputs import assert_same, generator

X = torch.randn(5, 6, generator=generator(1)).bfloat16()


def layer(seed: int = 0) -> Linear:
    linear = Linear(6, 4, part="head")
    with torch.no_grad():
        linear.weight.copy_(torch.randn(4, 6, generator=generator(seed)))
    return linear


def expected(linear: Linear) -> Tensor:
    return X @ linear.weight.detach().bfloat16().t()


def step(optimizer: Callable[..., torch.optim.Optimizer], linear: Linear) -> None:
    linear(X).float().square().sum().backward()
    optimizer(linear.parameters()).step()


def replace_data(linear: Linear) -> None:
    linear.weight.data = linear.weight.data * 2


CHANGES: dict[str, Callable[[Linear], object]] = {
    "an optimizer": lambda linear: step(lambda p: torch.optim.SGD(p, lr=0.5), linear),
    "a fused optimizer": lambda linear: step(lambda p: torch.optim.AdamW(p, lr=0.5, fused=True), linear),
    "an optimizer over many tensors": lambda linear: step(lambda p: torch.optim.AdamW(p, lr=0.5, foreach=True), linear),
    "a change in place": lambda linear: nn.init.ones_(linear.weight),
    "a loaded state": lambda linear: linear.load_state_dict(layer(seed=9).state_dict()),
    "new data": replace_data,
    "a new parameter": lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight.detach() + 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_cast_again(change: str) -> None:
    linear = layer()
    assert_same(linear(X), expected(linear))
    with torch.no_grad():
        assert_same(linear(X), expected(linear))
    before = expected(linear)
    CHANGES[change](linear)
    assert not torch.equal(expected(linear), before)
    assert_same(linear(X), expected(linear))


def test_an_unchanged_weight_is_cast_once_and_its_gradient_has_its_own_dtype() -> None:
    keep, w = KeptCast(), nn.Parameter(torch.randn(4, 6, generator=generator(2)))
    first, second = keep(w, torch.bfloat16), keep(w, torch.bfloat16)
    assert first.data_ptr() == second.data_ptr()
    assert_same(first, w.detach().bfloat16())
    assert_same(keep(w, torch.float16), w.detach().half())
    grads = [torch.randn(4, 6, generator=generator(seed)).bfloat16() for seed in (3, 4)]
    torch.autograd.backward((first, second), grads)
    assert w.grad is not None
    assert_same(w.grad, grads[0].float() + grads[1].float())
