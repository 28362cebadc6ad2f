"""Compile a part of the CPU library with an emulation of AMX tiles, to test the code for AMX on any processor."""

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
    """Compile a source file of kernels/csrc with emulated AMX tiles, and load the library.

    If there is no C++ compiler or no compiled CPU library, skip the test. The result is kept in the user's cache, under
    a name with a hash of the sources and of the emulation, so that it is compiled again only when these change.
    """
    command = build.compiler()
    if command is None or not is_compiled():
        pytest.skip("there is no C++ compiler for the emulation")
    content = "|".join((build.library_path().name, source, TILES.read_text()))
    name = f"tiles-{Path(source).stem}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"

    def make() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, name)
            flags = [*compilation.flags(compilation.requested()), f'-DFB_EMULATED_TILES="{TILES}"', "-shared"]
            subprocess.run([*command, *flags, str(compilation.SOURCES / source), "-o", str(target)], check=True)
            return target.read_bytes()

    return ctypes.CDLL(str(build.cached(build.cache_folder() / name, make)))
