"""What torch's compiler keeps out of, without loading it where nothing is compiled: it takes longer to import than all
the rest of torch, and torch's own means load it at the first call."""

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
    """As torch.compiler.disable does it, once there is a compiler."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return either


class UntracedOptimizer(Optimizer):
    """Nobody compiles one here."""

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
