"""Provide what layers need of torch's runtime: the current stream, and functions that are not compiled.

Importing torch's compiler takes longer than importing the rest of torch, and torch's own decorator
(torch.compiler.disable) imports it at the first call, so `untraced` excludes functions without importing it.
"""

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer


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
