"""Compare the cross entropy with its reference bit for bit, and with double precision within bounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.layers.cross_entropy import cross_entropy
from fewbits.kernels.reference import layers as reference
from tests.kernels.inputs import assert_same, generator

DTYPES = (torch.bfloat16, torch.float32)
IGNORED = -100


def inputs(rows: int, columns: int, dtype: torch.dtype, scale: float = 5.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits, the targets (some of them IGNORED), and the gradients of the losses."""
    g = generator(rows + columns)
    targets = torch.randint(columns, (rows,), generator=g)
    targets[1::4] = IGNORED
    return (scale * torch.randn(rows, columns, generator=g)).to(dtype), targets, torch.randn(rows, generator=g)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 15), (9, 16), (6, 17), (40, 1000), (3, 70001)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_every_bit_is_that_of_the_definition(shape: tuple[int, int], scale: float, dtype: torch.dtype) -> None:
    logits, targets, grad = inputs(*shape, dtype, scale)
    got, want = (
        torch.ops.fewbits.cross_entropy(logits, targets, IGNORED, False),
        reference.cross_entropy(logits, targets, IGNORED),
    )
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])
    dx = reference.cross_entropy_backward(logits, targets, got[1], grad, IGNORED)
    assert_same(torch.ops.fewbits.cross_entropy_backward(logits, targets, got[1], grad, IGNORED), dx)
    torch.ops.fewbits.cross_entropy_backward_(logits, targets, got[1], grad, IGNORED)
    assert_same(logits, dx)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("overwrite", [True, False])
def test_losses_and_gradients_are_those_of_double_precision(dtype: torch.dtype, overwrite: bool) -> None:
    logits, targets, grad = inputs(50, 3000, dtype)
    leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    losses = cross_entropy(leaf * 1, targets, ignored=IGNORED, overwrite=overwrite)
    want = F.cross_entropy(wide, targets, reduction="none", ignore_index=IGNORED)
    assert losses.dtype == torch.float32
    assert ((losses - want).abs() <= 1e-6 * (1 + want)).all()
    (dx,), (want_dx,) = torch.autograd.grad(losses, leaf, grad), torch.autograd.grad(want, wide, grad.double())
    # The gradient is rounded once. Its exponent x − log Σ e^x is a difference of numbers of up to 32, so its error is
    # some units in the last place of FP32.
    assert ((dx.double() - want_dx).abs() <= (torch.finfo(dtype).eps / 2 + 1e-5) * want_dx.abs() + 1e-7).all()


@pytest.mark.usefixtures("compiled")
def test_a_second_backward_pass_over_overwritten_logits_is_an_error() -> None:
    logits, targets, grad = inputs(8, 30, torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    losses = cross_entropy(leaf * 1, targets, ignored=IGNORED, overwrite=True)
    losses.backward(grad, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward(grad)


@pytest.mark.usefixtures("compiled")
def test_logits_that_may_not_be_overwritten_stay_and_another_layout_gives_the_same_bits() -> None:
    logits, targets, grad = inputs(12, 40, torch.bfloat16)
    results = []
    for x in (logits.clone(), logits.t().contiguous().t()):
        leaf = x.requires_grad_()
        (dx,) = torch.autograd.grad(cross_entropy(leaf, targets, ignored=IGNORED), leaf, grad)
        assert_same(leaf.detach(), logits)
        results.append(dx)
    assert_same(results[0], results[1])


@pytest.mark.parametrize("target", [30, -1, -101])
def test_a_target_that_is_no_column_is_refused_with_its_value(target: int) -> None:
    logits, targets, _ = inputs(8, 30, torch.bfloat16)
    targets[3] = target
    with pytest.raises(IndexError, match=rf"target {target}: .* 0 to 29"):
        cross_entropy(logits, targets, ignored=IGNORED)


def test_no_bit_depends_on_threads() -> None:
    logits, targets, grad = inputs(64, 1100, torch.bfloat16)
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        losses, log_sums = torch.ops.fewbits.cross_entropy(logits, targets, IGNORED, False)
        dx = torch.ops.fewbits.cross_entropy_backward(logits, targets, log_sums, grad, IGNORED)
        results.append((losses, log_sums, dx))
    for one, other in zip(*results, strict=True):
        assert_same(one, other)
