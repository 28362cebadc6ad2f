"""Provide what layers need of torch's runtime: the current stream, uncompiled functions, and caches of weights.

Importing torch's compiler takes longer than importing the rest of torch, and torch's own decorator
(torch.compiler.disable) imports it at the first call, so `untraced` excludes functions without importing it.

Tensors that are computed from a weight are cached until the weight changes, usually at the next optimizer update.
"""

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Function
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


def current_stream(device: torch.device) -> int:
    """Return the current stream of a device as a number; 0 for a device without streams.

    The number is part of cache keys: a tensor that one stream computes may not be finished when another stream reads
    it, so each stream must use only the cached tensors that it has computed itself.
    """
    if device.type != "cuda":
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(-1 if device.index is None else device.index)
    return stream


P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from compilation, as torch.compiler.disable does, but without importing the compiler."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)  # true in the tracer alone

    return either


class UntracedOptimizer(Optimizer):
    """A base class for optimizers that are never compiled.

    torch wraps Optimizer's `add_param_group` and `zero_grad` in a decorator that imports the compiler; here the methods
    are unwrapped.
    """

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)


# ------------------------------------------------------------------------------------------------ caches of weights

# Only casts of these types are cached: a cached cast of a sharded weight (DTensor) would keep the whole weight in
# memory, and a fake tensor has no values.
_ORDINARY: Final = (Tensor, nn.Parameter)


class _Updates:
    """A counter of the updates of all optimizers in this process.

    It is needed because a tensor's version counter does not change when a fused optimizer, or one that writes to
    `.data`, updates the tensor.
    """

    count = 0

    @classmethod
    def add(cls, *_: object) -> None:
        cls.count += 1


register_optimizer_step_post_hook(_Updates.add)


def updates() -> int:
    """Return the number of updates of all optimizers in this process so far."""
    return _Updates.count


def invalidate_caches() -> None:
    """Let every cache of this process compute its tensors again, as after an update."""
    _Updates.add()


def version(w: Tensor) -> tuple[int, int, int, int]:
    """Return a cache key for what is computed from w; it changes when the values of w may have changed.

    The key changes after any optimizer update, after a change of w in place, and when w moves to other memory. It also
    differs between CUDA streams, because one stream does not wait for the results of another. A cache must keep w
    alive: the key contains the address of w, which another weight could get after w is freed.
    """
    return _Updates.count, w._version, w.data_ptr(), current_stream(w.device)


class KeptCast:
    """Casts a master weight to the compute dtype, and returns the cached cast until the weight changes.

    The backward pass casts the gradient to the weight's dtype. A copy or a pickle of this object has an empty cache.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._source: Tensor | None = None  # the weight, kept alive because the key contains its address
        self._cast: Tensor | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return KeptCast, ()

    def __call__(self, w: Tensor, dtype: torch.dtype) -> Tensor:
        """Return w cast to `dtype`, as a tensor through which the gradient reaches w.

        The cast comes from the cache, except in the cases in which `values` returns None; there it is `w.to(dtype)`.
        """
        cast = self.values(w, dtype)
        return w.to(dtype) if cast is None else _StraightThrough.apply(w, cast)

    def values(self, w: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return w cast to `dtype`, from the cache if w has not changed, and without a connection to autograd.

        Return None, without using the cache, if w already has this dtype, if torch's compiler is tracing, or if w is
        sharded or a fake tensor.
        """
        if w.dtype == dtype or torch.compiler.is_compiling() or type(w) not in _ORDINARY:
            return None
        key = (*version(w), dtype)
        if self._cast is None or self._key != key:
            self._cast = None  # frees the old values before the new ones are allocated
            self._key, self._source, self._cast = key, w.detach(), w.detach().to(dtype)
        return self._cast


class _StraightThrough(Function):
    """Returns the tensor `cast`, which holds w in another dtype; passes the gradient on to w, in w's dtype."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = w.dtype
        return cast.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
