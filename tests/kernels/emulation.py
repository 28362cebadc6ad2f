"""Compile a part of the CPU library with AMX tiles that are computed in C++, to test it on any processor."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from fewbits.kernels.backends import build, compilation
from fewbits.kernels.layers.library import is_compiled

TILES = Path(__file__).parent / "emulated_tiles.h"


def library_with_tiles(source: str, folder: Path) -> ctypes.CDLL:
    """Compile a source of kernels/csrc and load it; skip the test where the CPU library is not compiled."""
    command, target = build.compiler(), folder / "tiles.so"
    if command is None or not is_compiled():
        pytest.skip("there is no C++ compiler for the emulation")
    flags = [*compilation.flags(), f'-DFB_EMULATED_TILES="{TILES}"', "-shared"]
    subprocess.run([*command, *flags, str(compilation.SOURCES / source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))
