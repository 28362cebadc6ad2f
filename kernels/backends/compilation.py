"""Define the sources and the compiler's flags that determine the machine code of the CPU kernels."""

import os
import platform
from pathlib import Path

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
NATIVE = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "aarch64": ("-mcpu=native",)}
ARCHITECTURE = "FEWBITS_CPU_ARCH"  # environment variable that replaces the value of -march, for example x86-64-v3


def cpu_sources() -> list[Path]:
    """Return all .h and .cpp files of csrc/ in sorted order: the sources of the CPU library, headers included."""
    return sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])


def flags() -> tuple[str, ...]:
    """Return the compiler's flags for this processor, or for the one that FEWBITS_CPU_ARCH names."""
    native = NATIVE.get(platform.machine(), ())
    requested = os.environ.get(ARCHITECTURE)
    return FLAGS + ((f"-march={requested}", *native[1:]) if requested else native)
