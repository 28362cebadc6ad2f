"""Keep what is computed from weights until they change: usually until the next update of an optimizer."""

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.optim.optimizer import register_optimizer_step_post_hook

from fewbits.models.streams import current_stream

_ORDINARY: Final = (Tensor, nn.Parameter)  # not DTensors, whose owners must not keep copies, nor fake tensors


class _Updates:
    """A counter of the updates of all optimizers.

    A tensor's version counter misses the updates of fused optimizers, and of those that write to `.data`.
    """

    count = 0

    @classmethod
    def add(cls, *_: object) -> None:
        cls.count += 1


register_optimizer_step_post_hook(_Updates.add)


def version(w: Tensor) -> tuple[int, int, int, int]:
    """Return a value that differs after an update of an optimizer, a change in place, or a move to other memory.

    It differs between streams too, because one stream does not wait for what another computes. It contains the address,
    so what is kept under it must keep w alive, else another weight may get the address.
    """
    return _Updates.count, w._version, w.data_ptr(), current_stream(w.device)


class KeptCast:
    """Casts a master weight to the compute dtype when it has changed, and otherwise returns the cast that it kept.

    Gradients reach the weight in its own dtype. A copy or a pickle of this object is empty.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._source: Tensor | None = None  # kept alive, see `version`
        self._cast: Tensor | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return KeptCast, ()

    def __call__(self, w: Tensor, dtype: torch.dtype) -> Tensor:
        """Return w in `dtype`; where the compiler traces, or w is no ordinary tensor, it is cast by each call."""
        cast = self.values(w, dtype)
        return w.to(dtype) if cast is None else _StraightThrough.apply(w, cast)

    def values(self, w: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the cast without a path for gradients; None if w has that dtype, or is cast by each call."""
        if w.dtype == dtype or torch.compiler.is_compiling() or type(w) not in _ORDINARY:
            return None
        key = (*version(w), dtype)
        if self._cast is None or self._key != key:
            self._cast = None  # frees the old values before the new ones are allocated
            self._key, self._source, self._cast = key, w.detach(), w.detach().to(dtype)
        return self._cast


class _StraightThrough(Function):
    """Returns `cast`, with w's gradient as if it had been cast here."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = w.dtype
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
