"""Register and call torch operators of the library `fewbits`, which `torch.ops.fewbits` contains."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

LIBRARY: Final = torch.library.Library("fewbits", "DEF")


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], devices: tuple[str, ...] = ("CPU", "CUDA")
) -> None:
    """Define an operator: `run` computes it on `devices`, `fake` returns empty results for fake tensors."""
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    for key in devices:
        LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"fewbits::{name}", fake, lib=LIBRARY)


def call(operator: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    """Call an operator of which only x may need a gradient; skip autograd's layer, which is in Python, if it does not.

    That layer takes as long as the launch of a kernel.
    """
    refuse_distributed(x)
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return operator(x, *arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(x, *arguments)


def refuse_distributed(x: Tensor) -> None:
    """Raise ValueError for a DTensor: a shard's blocks and scales are not those of the whole tensor."""
    if type(x).__name__ == "DTensor":
        raise ValueError(
            "expected an ordinary tensor, not a DTensor, whose shards would get scales of their own: pass "
            "x.full_tensor(), or x.to_local() if no block extends beyond a shard"
        )
