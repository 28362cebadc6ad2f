"""Compiles CUDA kernels at first use with NVRTC, and keeps each cubin under a name that says what it was made of.

A kernel is compiled for a variant: one set of constants (device.py), so that it stays small and spills nothing,
and for one architecture. As with the CPU library (build.py), the name is a hash of sources, constants, options and
NVRTC's version; one process compiles under a lock; the file appears whole, by a rename, and ends with its hash.

We compile ourselves because CuPy's own compilation adds -ftz=true, which flushes subnormals. No GPU is needed.
"""

import ctypes
import ctypes.util
import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fewbits.common.locks import locked
from fewbits.kernels.backends.build import NO_LOCKS, SOURCES, BuildError, cache_folder, is_whole, opened

# -fmad=false keeps a*b+c at two roundings, as the reference has them. Division and subnormals are IEEE's by default;
# they are named because results rest on them. ptxas reports what a kernel uses, for the compile check.
OPTIONS = (
    "-std=c++17",
    "-fmad=false",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    f"-I{SOURCES}",
    "--ptxas-options=-v",
)
INSTALL = "pip install nvidia-cuda-nvrtc"


@dataclass(frozen=True)
class Usage:
    """What ptxas says that a thread and a CTA of a kernel use."""

    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int


def source_of(file: str, constants: dict[str, str]) -> str:
    """A translation unit: the constants of a variant, and the file that they are for."""
    return "".join(f"#define {name} {value}\n" for name, value in constants.items()) + f'#include "{file}"\n'


def cubin(source: str, architecture: str) -> bytes:
    """Machine code for `architecture` (`sm_90`), cached or compiled. BuildError if NVRTC fails or is missing."""
    target = _path(source, architecture)
    if not is_whole(target):
        with opened(target.with_suffix(".lock")) as lock, locked(lock, NO_LOCKS):
            if not is_whole(target):
                code, _ = compile_now(source, architecture)
                unfinished = target.with_suffix(".tmp")
                with open(unfinished, "wb") as file:
                    file.write(code + hashlib.sha256(code).digest())
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.rename(target)
    return target.read_bytes()[:-32]


def compile_now(source: str, architecture: str) -> tuple[bytes, str]:
    """-> machine code, and what NVRTC and ptxas had to say."""
    library, program = nvrtc(), ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={architecture}")]
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _text(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status:
            raise BuildError(f"NVRTC failed for {architecture}: {log or _error(library, status)}")
        return _text(library, program, "CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def usage(log: str) -> Usage:
    """Of the one kernel that a log of ours speaks of."""

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    return Usage(
        registers=number(r"Used (\d+) registers"),
        spilled_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem"),
    )


@cache
def nvrtc() -> ctypes.CDLL:
    """NVRTC, from NVIDIA's packages (torch with CUDA brings them) or the system's toolkit."""
    candidates = [*_packaged(), ctypes.util.find_library("nvrtc")]
    for candidate in candidates:
        if candidate:
            try:
                return ctypes.CDLL(str(candidate))
            except OSError:
                continue
    raise BuildError(f"no NVRTC, which compiles the CUDA kernels: {INSTALL}")


def _packaged() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return [path for folder in folders for path in sorted(folder.rglob("libnvrtc.so*"), reverse=True)]


def _path(source: str, architecture: str) -> Path:
    parts = [source, architecture, _version(), *OPTIONS[:-2], OPTIONS[-1], _sources()]
    return cache_folder() / f"cuda-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.cubin"


@cache
def _sources() -> str:
    return "|".join(
        f"{path.name}\n{path.read_text()}" for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cu*")])
    )


@cache
def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc(), nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, content))
    return content.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise BuildError(f"NVRTC: {_error(library, status)}")


def _error(library: ctypes.CDLL, status: int) -> str:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return str(library.nvrtcGetErrorString(status).decode())
