"""Check that functions which skip torch's dispatcher give the same results and gradients as the torch operators."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fewbits.kernels.layers.activations import squared_relu, swiglu
from fewbits.kernels.layers.norms import add_norm
from fewbits.kernels.products import matmul_fp32
from tests.kernels.inputs import assert_same, generator

ROWS, WIDTH = 6, 32
Inputs = tuple[Tensor, Tensor, Tensor]

# name -> (a function that skips the dispatcher, the same function by the torch operator)
PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "squared ReLU": (lambda x, y, w: squared_relu(x), lambda x, y, w: torch.ops.fewbits.squared_relu(x)),
    "SwiGLU": (lambda x, y, w: swiglu(x, y), lambda x, y, w: torch.ops.fewbits.swiglu(x, y)),
    "norm of a sum": (
        lambda x, y, w: add_norm(x, y, w, eps=1e-5, centered=True)[1],
        lambda x, y, w: torch.ops.fewbits.add_norm(x, y, w, None, 0.0, 1e-5, True)[1],
    ),
    "product": (lambda x, y, w: matmul_fp32(x, y.t()), lambda x, y, w: torch.ops.fewbits.matmul_fp32(x, y.t())),
}


def inputs() -> Inputs:
    x, y = (torch.randn(ROWS, WIDTH, generator=generator(seed)).bfloat16().requires_grad_() for seed in (1, 2))
    return x, y, torch.randn(WIDTH, generator=generator(3)).requires_grad_()


def results(function: Callable[..., Tensor]) -> list[Tensor]:
    """Return the result of `function` for `inputs()`, and the gradients of the inputs that `function` uses."""
    given = inputs()
    result = function(*given)
    (result.float() * torch.arange(result.numel()).view(result.shape)).sum().backward()
    return [result.detach(), *(x.grad for x in given if x.grad is not None)]


@pytest.mark.parametrize("name", PAIRS)
def test_results_and_gradients_are_those_of_the_operator(name: str) -> None:
    for got, want in zip(*map(results, PAIRS[name]), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("name", PAIRS)
def test_a_dispatch_mode_sees_the_operator(name: str) -> None:
    calls: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(func.namespace)
            return func(*args, **(kwargs or {}))

    with Recorder():
        PAIRS[name][0](*inputs())
    assert "fewbits" in calls
