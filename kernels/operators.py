"""Register and call the torch operators of the library `fewbits`; torch provides them as `torch.ops.fewbits.<name>`."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function

LIBRARY: Final = torch.library.Library("fewbits", "DEF")


_DIRECT: Final[dict[Any, Callable[..., Any]]] = {}  # operator -> the Python function that computes it
_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_ORDINARY: Final = (Tensor, torch.nn.Parameter)  # not DTensors, fake tensors, or tensors that a compiler traces


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], devices: tuple[str, ...] = ("CPU", "CUDA")
) -> Callable[..., Any]:
    """Define an operator: `run` computes it on `devices`, `fake` returns empty results for fake tensors.

    schema: the name and the signature in torch's syntax. Return the operator as a function that skips torch's
    dispatcher if no gradient is recorded and `can_skip_dispatcher` allows it.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    for key in devices:
        LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"fewbits::{name}", fake, lib=LIBRARY)
    operator = getattr(torch.ops.fewbits, name)
    _DIRECT[operator] = run

    def without_gradient(*arguments: Any) -> Any:
        direct = not torch.is_grad_enabled() and can_skip_dispatcher(arguments)
        return run(*arguments) if direct else operator(*arguments)

    return without_gradient


def differentiate(
    name: str, keep: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """Define the gradient of the operator `name`.

    keep, backward: the arguments setup_context and backward of torch.library.register_autograd. Return the operator as
    a function. For ordinary tensors it uses an autograd.Function directly, because torch's dispatcher and
    torch's Python layer for gradients of operators take several times as long.
    """
    torch.library.register_autograd(f"fewbits::{name}", backward, setup_context=keep, lib=LIBRARY)
    operator = getattr(torch.ops.fewbits, name)
    run = _DIRECT[operator]

    # `keep` is called here and not set as setup_context of the class, because with a setup_context torch binds the
    # arguments to the signature of `forward` in each call, which takes time.
    def forward(ctx: Any, *arguments: Any) -> Any:
        result = run(*arguments)
        keep(ctx, arguments, result)
        return result

    direct: Any = type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})

    def with_gradient(*arguments: Any) -> Any:
        return (direct.apply if can_skip_dispatcher(arguments) else operator)(*arguments)

    return with_gradient


def call(operator: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    """Call an operator with the given arguments; it is differentiable only in x, which must not be a DTensor.

    If x needs no gradient and torch.compile is not tracing, the call skips autograd's Python layer, which takes as long
    as the launch of a kernel. If in addition `can_skip_dispatcher` allows it, the call skips torch's dispatcher, too.
    """
    refuse_distributed(x)
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return operator(x, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return (_DIRECT[operator] if can_skip_dispatcher((x, *arguments)) else operator)(x, *arguments)


def can_skip_dispatcher(arguments: tuple[Any, ...]) -> bool:
    """Tell whether all tensor arguments are plain tensors on a CPU or a GPU, and nothing intercepts operators.

    A compiler, a mode or a transform may intercept them. Arguments that are not tensors are ignored.
    """
    observed = torch.compiler.is_compiling() or _dispatch_modes() or _transforms()
    return not observed and all(
        type(x) in _ORDINARY and (x.is_cpu or x.is_cuda) for x in arguments if isinstance(x, Tensor)
    )


def refuse_distributed(x: Tensor) -> None:
    """Raise ValueError for a DTensor: a shard's blocks and scales are not those of the whole tensor."""
    if type(x).__name__ == "DTensor":
        raise ValueError(
            "expected an ordinary tensor, not a DTensor, whose shards would get scales of their own: pass "
            "x.full_tensor(), or x.to_local() if no block extends beyond a shard"
        )
