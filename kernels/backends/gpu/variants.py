"""Define Variant, a CUDA kernel with the constants for which it is compiled, and Launcher, which launches it.

Spec, the constants for one quantizer, has the same fields in the same order as the struct Spec in csrc/spec.cuh.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from fewbits.kernels.backends.constants import Grid, Scaling, grid_of, scaling_of
from fewbits.kernels.backends.gpu.tiles import Shape
from fewbits.kernels.backends.protocol import DTYPES
from fewbits.kernels.quantizer import Quantizer

# -fmad=false keeps the two roundings of a*b+c, as in the reference. Division and subnormals follow IEEE by default; the
# options are explicit because results depend on them. With -v, ptxas logs each kernel's registers and spills, which
# tests check.
OPTIONS = (
    "-std=c++17",
    "-fmad=false",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "--ptxas-options=-v",
)
DTYPE_NAMES = dict(zip(DTYPES, ("Bf16", "Fp16", "Fp32"), strict=True))
ON_CHIP, LOOKUP, STRIP = range(3)  # the values of Source in csrc/spec.cuh, which documents them


class Spec(NamedTuple):
    """The constants of a kernel for one quantizer; the comments in csrc/spec.cuh explain the fields.

    With the default values, a kernel counts no statistics, skips no part of the matrix, and writes values, not codes.
    """

    grid: Grid
    scaling: Scaling
    stochastic: int
    group: int
    hadamard: int
    ragged: int = 0
    inverse: int = 0
    down: int = 0
    source: int = 0
    block_rows: int = 1
    block_cols: int = 1
    stats: int = 0
    skips: int = 0
    encodes: int = 0
    operand: int = 0
    piece: int = 0
    block_piece: int = 0
    replayed: int = 0


def spec_of(q: Quantizer, axis: int) -> Spec:
    return Spec(
        grid=grid_of(q.format, q.overflow),
        scaling=scaling_of(q),
        stochastic=int(q.rounding == "stochastic"),
        group=q.group_blocks,
        hadamard=q.hadamard or 0,
        down=int(axis == 0),
    )


@dataclass(frozen=True)
class Variant:
    """A kernel and the constants for which it is compiled.

    `dtypes` has the C++ name of the matrix's dtype. For the kernels of weights.cu it also has a second name: the dtype
    of the result of `sample_weight`, or of the gradient of this result.
    """

    file: str  # the file in csrc/ that defines the kernel
    kernel: str  # the name of the kernel's function
    dtypes: tuple[str, ...]
    shape: Shape
    specs: tuple[Spec, ...]

    def source(self) -> str:
        """Return the source to compile: the constants as macros, then an #include of the file that uses them."""
        macros = {
            "FB_KERNEL": self.kernel,
            **dict(zip(("FB_DTYPE", "FB_OTHER"), self.dtypes, strict=False)),
            "FB_SHAPE": _listed(self.shape),
            "FB_SPECS": ", ".join(f"{{{_listed(spec)}}}" for spec in self.specs),
            "FB_COUNT": len(self.specs),
        }
        return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + f'#include "{self.file}"\n'


# A function that queues a kernel on the device's current stream. Its arguments are the number of CTAs, the bytes of
# dynamic shared memory per CTA, and the address of an array whose first element is the address of the kernel's
# arguments. The arguments are copied before the function returns.
Kernel = Callable[[int, int, int], None]


class Launcher(Protocol):
    def kernel(self, variant: Variant, device: torch.device) -> Kernel:
        """Return the function that queues the kernel on the device; load the kernel at the first call."""

    def shared_memory(self, device: torch.device) -> int:
        """Return the largest dynamic shared memory, in bytes, that a CTA of the device can have."""


def _listed(constants: Iterable[object]) -> str:
    """Return nested constants as a C++ initialiser, without its outermost braces."""
    return ", ".join(f"{{{_listed(part)}}}" if isinstance(part, tuple) else str(part) for part in constants)
