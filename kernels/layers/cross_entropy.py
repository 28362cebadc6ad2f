"""Compute the cross entropy of rows of logits without an FP32 copy of the logits.

The loss is computed in FP32 from the logits in their own dtype, and the gradient is written in that dtype. With
`overwrite=True` the backward pass writes the gradient over the logits, so that a large vocabulary needs the memory of
its logits only once. autograd raises an error if the logits are needed afterwards, as in a second backward pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.backends.cpu import threads
from fewbits.kernels.layers.library import gpu_layers, is_compiled, is_float, library, takes
from fewbits.kernels.operators import define, differentiate
from fewbits.kernels.reference import layers as reference


def cross_entropy(logits: Tensor, targets: Tensor, *, ignored: int, overwrite: bool = False) -> Tensor:
    """Return −log softmax(logits)[target] of each row in FP32; 0 for a row whose target equals `ignored`.

    Raise IndexError for another target that is no column. On a GPU, where a check would wait for the device, the loss
    and the gradient of such a row are NaN.

    overwrite: True allows the backward pass to replace the logits by their gradient; the caller must not use the logits
        later.
    """
    if not takes(logits):
        return F.cross_entropy(logits.float(), targets, reduction="none", ignore_index=ignored)
    targets = targets.long()  # the kernels read int64; of another integer type, as torch, is accepted
    overwrite = overwrite and logits.is_contiguous() and not torch.compiler.is_compiling()
    return _cross_entropy_of(logits, targets, ignored, overwrite)[0]


def _check(targets: Tensor, columns: int, ignored: int) -> None:
    wrong = targets[(targets != ignored) & ((targets < 0) | (targets >= columns))]
    if len(wrong):
        raise IndexError(f"target {int(wrong[0])}: valid targets are 0 to {columns - 1}, and {ignored} for no loss")


def _cross_entropy(logits: Tensor, targets: Tensor, ignored: int, overwrite: bool) -> tuple[Tensor, Tensor]:
    logits, targets = logits.contiguous(), targets.contiguous()
    losses, log_sums = _fake(logits)
    if (gpu := gpu_layers(logits)) is not None:
        gpu.cross_entropy(logits, targets, ignored, (losses, log_sums))
        return losses, log_sums
    _check(targets, logits.shape[1], ignored)
    if not is_compiled(logits.device.type):
        return reference.cross_entropy(logits, targets, ignored)
    library().fb_entropy(
        *(is_float(logits), logits.data_ptr(), *logits.shape, targets.data_ptr(), ignored),
        *(losses.data_ptr(), log_sums.data_ptr(), threads(logits.numel())),
    )
    return losses, log_sums


def _fake(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return losses, torch.empty_like(losses)


def _has_kernels(logits: Tensor) -> bool:
    return gpu_layers(logits) is not None or is_compiled(logits.device.type)


def _backward_into(dx: Tensor, logits: Tensor, targets: Tensor, log_sums: Tensor, grad: Tensor, ignored: int) -> None:
    """Write the gradient of the logits into dx by the compiled kernels of a GPU or a CPU."""
    targets, grad, log_sums = targets.contiguous(), grad.contiguous(), log_sums.contiguous()
    if (gpu := gpu_layers(logits)) is not None:
        gpu.cross_entropy_backward(dx, logits, targets, log_sums, grad, ignored)
        return
    library().fb_entropy_backward(
        *(is_float(logits), logits.data_ptr(), *logits.shape, targets.data_ptr(), ignored),
        *(log_sums.data_ptr(), grad.data_ptr(), dx.data_ptr(), threads(logits.numel())),
    )


def _backward(logits: Tensor, targets: Tensor, log_sums: Tensor, grad: Tensor, ignored: int) -> Tensor:
    if not _has_kernels(logits):
        return reference.cross_entropy_backward(logits, targets, log_sums, grad, ignored)
    logits = logits.contiguous()
    dx = torch.empty_like(logits)
    _backward_into(dx, logits, targets, log_sums, grad, ignored)
    return dx


def _backward_in_place(logits: Tensor, targets: Tensor, log_sums: Tensor, grad: Tensor, ignored: int) -> None:
    if _has_kernels(logits) and logits.is_contiguous():
        _backward_into(logits, logits, targets, log_sums, grad, ignored)
    else:
        logits.copy_(_backward(logits, targets, log_sums, grad, ignored))


define(
    "cross_entropy(Tensor logits, Tensor targets, int ignored, bool overwrite) -> (Tensor, Tensor)",
    _cross_entropy,
    _fake,
)
_ARGUMENTS = "Tensor targets, Tensor log_sums, Tensor grad, int ignored"
_gradient_of = define(
    f"cross_entropy_backward(Tensor logits, {_ARGUMENTS}) -> Tensor",
    _backward,
    lambda logits, *_: logits.new_empty(logits.shape),
)
_gradient_in_place = define(
    f"cross_entropy_backward_(Tensor(a!) logits, {_ARGUMENTS}) -> ()",
    _backward_in_place,
    lambda *_: None,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, ctx.ignored, ctx.overwrite = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, targets, output[1])


def _gradient(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, None, None, None]:
    if grad is None:
        return None, None, None, None
    logits, targets, log_sums = ctx.saved_tensors
    if ctx.overwrite:
        _gradient_in_place(logits, targets, log_sums, grad, ctx.ignored)
        torch.autograd.graph.increment_version(logits)  # the operator does not; it makes later uses of logits errors
        return logits, None, None, None
    dx = _gradient_of(logits, targets, log_sums, grad, ctx.ignored)
    return dx, None, None, None


_cross_entropy_of = differentiate("cross_entropy", _keep, _gradient)
