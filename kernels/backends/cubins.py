"""Compile CUDA kernels at first use with NVRTC, and cache each cubin under a name that hashes its sources.

A kernel is compiled for one architecture and one variant, which is a set of constants (device.py), so that it stays
small and does not spill registers. As with the CPU library (build.py), the hash covers sources, constants, options and
NVRTC's version; one process compiles at a time, under a lock; the file appears complete, by a rename, and ends with its
hash.

We compile ourselves because CuPy's compilation adds -ftz=true, which flushes subnormals. No GPU is needed.
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
from fewbits.kernels.backends.build import NO_LOCKS, SOURCES, BuildError, cache_folder, is_whole, open_lock

# -fmad=false keeps the two roundings of a*b+c, as in the reference. Division and subnormals follow IEEE by default; the
# options are explicit because results depend on them. ptxas reports each kernel's resources for the compile check.
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
    """The resources that a thread and a CTA of a kernel use, as reported by ptxas."""

    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int


def translation_unit(file: str, constants: dict[str, str]) -> str:
    """Return a translation unit: the constants of a variant as macros, and the file that uses them."""
    return "".join(f"#define {name} {value}\n" for name, value in constants.items()) + f'#include "{file}"\n'


def cubin(source: str, architecture: str) -> bytes:
    """Return machine code for `architecture` (`sm_90`), cached or compiled; raise BuildError if NVRTC cannot."""
    target = _path(source, architecture)
    if not is_whole(target):
        with open_lock(target.with_suffix(".lock")) as lock, locked(lock, NO_LOCKS):
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
    """Compile a source; return the machine code and the log of NVRTC and ptxas."""
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
    """Return the resources of the one kernel that a ptxas log describes."""

    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match[1]) if match else 0

    return Usage(
        registers=number(r"Used (\d+) registers"),
        spilled_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem"),
    )


@cache
def nvrtc() -> ctypes.CDLL:
    """Load NVRTC from NVIDIA's packages (torch with CUDA installs them) or from the system's toolkit."""
    candidates = [*_packaged(), ctypes.util.find_library("nvrtc")]
    for candidate in candidates:
        if candidate:
            try:
                return ctypes.CDLL(str(candidate))
            except OSError:
                continue
    raise BuildError(f"NVRTC, which compiles the CUDA kernels, is missing: {INSTALL}")


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
