"""Compile a part of the CPU library with AMX tiles that are computed in C++, to test it on any processor."""

import ctypes
import hashlib
import subprocess
import tempfile
from pathlib import Path

import pytest

from fewbits.kernels.backends import build, compilation
from fewbits.kernels.layers.library import is_compiled

TILES = Path(__file__).parent / "emulated_tiles.h"


def library_with_tiles(source: str) -> ctypes.CDLL:
    """Compile a source of kernels/csrc and load it; skip the test where the CPU library is not compiled.

    The result is kept in the user's cache, under a hash of what the CPU library depends on and of the tiles.
    """
    command = build.compiler()
    if command is None or not is_compiled():
        pytest.skip("there is no C++ compiler for the emulation")
    content = "|".join((build.library_path().name, source, TILES.read_text()))
    name = f"tiles-{Path(source).stem}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"

    def make() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, name)
            flags = [*compilation.flags(), f'-DFB_EMULATED_TILES="{TILES}"', "-shared"]
            subprocess.run([*command, *flags, str(compilation.SOURCES / source), "-o", str(target)], check=True)
            return target.read_bytes()

    return ctypes.CDLL(str(build.cached(build.cache_folder() / name, make)))
