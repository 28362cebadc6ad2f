"""Register torch operators of the library `fewbits`, which `torch.ops.fewbits` contains."""

from collections.abc import Callable
from typing import Any, Final

import torch

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
