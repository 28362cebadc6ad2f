"""Define the sources and the compiler's flags that determine the machine code of the CPU kernels."""

import os
import platform
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parents[1] / "csrc"
UNITS = (
    "cpu.cpp",
    "cpu_bf16.cpp",
    "cpu_fp16.cpp",
    "cpu_fp32.cpp",
    "cpu_packed.cpp",
    "cpu_noise.cpp",
    "cpu_gemm.cpp",
    "cpu_norm.cpp",
    "cpu_activation.cpp",
    "cpu_attention.cpp",
    "cpu_entropy.cpp",
)

# -fno-trapping-math and -fno-math-errno let the compiler vectorise loops with comparisons and roots.
# -ffp-contract=off keeps the two roundings of a*b+c, as in the reference. No flag may reorder float operations.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-Wno-psabi",
)
WIDE = "-mprefer-vector-width=512"
NATIVE = {"x86_64": ("-march=native", WIDE), "aarch64": ("-mcpu=native",)}
ARCHITECTURE = "FEWBITS_CPU_ARCH"  # environment variable that replaces the value of -march, for example x86-64-v3


class Level(NamedTuple):
    """An instruction set for which wheels contain the compiled kernels."""

    needs: frozenset[str]  # flags in /proc/cpuinfo
    flags: tuple[str, ...]  # of the compiler, in place of those of NATIVE


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = ("-march=x86-64-v4", "-mavx512bf16", WIDE)
LEVELS = {  # the newest first
    "amx": Level(_V4 | {"avx512_bf16", "amx_tile", "amx_bf16"}, (*_BF16, "-mamx-tile", "-mamx-bf16")),
    "avx512-bf16": Level(_V4 | {"avx512_bf16"}, _BF16),
    "x86-64-v4": Level(_V4, ("-march=x86-64-v4", WIDE)),
    "x86-64-v3": Level(_V3, ("-march=x86-64-v3", WIDE)),
}


def cpu_sources() -> list[Path]:
    """Return all .h and .cpp files of csrc/ in sorted order: the sources of the CPU library, headers included."""
    return sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])


def requested() -> str | None:
    """Return the architecture that FEWBITS_CPU_ARCH names: one of LEVELS, or a value of -march; None: not set."""
    return os.environ.get(ARCHITECTURE) or None


def flags(architecture: str | None) -> tuple[str, ...]:
    """Return the compiler's flags for an architecture as in `requested`; None: for this processor."""
    if architecture in LEVELS:
        return FLAGS + LEVELS[architecture].flags
    native = NATIVE.get(platform.machine(), ())
    return FLAGS + ((f"-march={architecture}", *native[1:]) if architecture else native)
