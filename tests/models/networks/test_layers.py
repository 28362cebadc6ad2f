"""Compare each layer and its gradients with torch's own layer in FP32."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.models.networks.layers import (
    NORMS,
    Linear,
)

EPS = 1e-5


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def same_with_gradients(ours: Tensor, theirs: Tensor, inputs: list[Tensor], rtol: float, atol: float) -> None:
    """Assert that two results, and their gradients for the inputs, are equal within a tolerance."""
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
    cotangent = normal(*theirs.shape, seed=99).detach()
    grads = torch.autograd.grad((ours * cotangent).sum(), inputs)
    expected = torch.autograd.grad((theirs * cotangent).sum(), inputs)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=rtol, atol=atol)


def stirred(norm: str) -> torch.nn.Module:
    """Return a norm of width 48 with random parameters."""
    module = NORMS[norm](48, EPS, True)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.add_(normal(48, seed=number + 5))
    return module


TORCH_NORMS: dict[str, Callable[[Tensor, torch.nn.Module], Tensor]] = {
    "layernorm": lambda x, m: F.layer_norm(x, (48,), m.weight, m.bias, EPS),  # type: ignore[arg-type]
    "layernorm1p": lambda x, m: F.layer_norm(x, (48,), m.weight + 1, m.bias, EPS),  # type: ignore[arg-type, operator]
    "rmsnorm": lambda x, m: F.rms_norm(x, (48,), m.weight, EPS),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_torchs(norm: str) -> None:
    module, x = stirred(norm), normal(2, 7, 48)
    inputs = [x, *module.parameters()]
    same_with_gradients(module(x), TORCH_NORMS[norm](x, module), inputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_compute_in_fp32_and_return_the_input_dtype(norm: str) -> None:
    module, x = stirred(norm), normal(2, 7, 48, dtype=torch.bfloat16)
    y, exact = module(x), TORCH_NORMS[norm](x.float(), module)
    assert y.dtype == torch.bfloat16
    # The FP32 result is rounded to BF16 once, so the error is at most half the distance of neighbouring BF16 numbers.
    assert ((y.float() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())


def test_a_linear_layer_keeps_fp32_and_computes_in_the_dtype_of_its_input() -> None:
    linear, x = Linear(16, 8, part="up", bias=True), normal(3, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(normal(*parameter.shape, seed=2))
    y = linear(x)
    assert torch.equal(y, F.linear(x, linear.weight.bfloat16(), linear.bias.bfloat16()))
    y.sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.dtype == linear.weight.grad.dtype == torch.float32
    assert isinstance(linear, torch.nn.Linear)


# ------------------------------------------------------------------------------------------------ positions
