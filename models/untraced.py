"""Exclude functions from torch's compiler, without importing the compiler in processes that compile nothing.

Importing the compiler takes longer than importing the rest of torch, and torch's own decorator
(torch.compiler.disable) imports it at the first call.
"""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo
from torch.optim import Optimizer

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function from compilation, as torch.compiler.disable does, but without importing the compiler."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return either


class UntracedOptimizer(Optimizer):
    """A base class for optimizers that are never compiled.

    torch wraps Optimizer's `add_param_group` and `zero_grad` in a decorator that imports the compiler; here the methods
    are unwrapped.
    """

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
