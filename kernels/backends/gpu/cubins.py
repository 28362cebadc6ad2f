"""Compile CUDA kernels with NVRTC at first use, and cache the machine code of each (a cubin) in a file.

A kernel is compiled separately for each architecture and each variant, which is a set of constants (variants.py), so
that its code is small and does not spill registers. The file's name contains a hash of the sources, constants, options
and NVRTC's version. As with the CPU library (build.py), one process compiles at a time, under a lock; a file is renamed
when it is complete; and it ends with its name and the hash of its content.

For a GPU that NVRTC does not know, PTX is compiled instead, which the driver translates when it loads the kernel.

CuPy does not compile the kernels, because it adds -ftz=true, which flushes subnormals. Compilation needs no GPU.
"""

import ctypes
import ctypes.util
import hashlib
import importlib.util
from functools import cache
from pathlib import Path

from fewbits.kernels.backends.build import BuildError, cache_folder, cached, content_of
from fewbits.kernels.backends.compilation import SOURCES
from fewbits.kernels.backends.gpu.variants import OPTIONS


def install(major: int) -> str:
    """Return the pip command that installs NVRTC for CUDA `major`; up to CUDA 12, the package's name has a suffix."""
    return f"pip install nvidia-cuda-nvrtc{f'-cu{major}' if major < 13 else f'=={major}.*'}"


def cubin(source: str, architecture: str) -> bytes:
    """Return the machine code of a CUDA source for an architecture such as `sm_90`; compile it if it is not cached.

    For an architecture such as `compute_90`, return PTX. Raise BuildError if NVRTC is missing or fails.
    """
    return content_of(cached(_path(source, architecture), lambda: compile_now(source, architecture)[0]))


def discard(source: str, architecture: str) -> None:
    """Delete the cached machine code of a source and architecture, because the driver rejected it."""
    _path(source, architecture).unlink(missing_ok=True)


def compile_now(source: str, architecture: str) -> tuple[bytes, str]:
    """Compile a source without reading or writing the cache; return the machine code and the log of NVRTC and ptxas.

    Raise BuildError if NVRTC is missing or fails.
    """
    library, program = nvrtc(), ctypes.c_void_p()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        options = [option.encode() for option in (*OPTIONS, f"-I{SOURCES}", f"--gpu-architecture={architecture}")]
        status = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _text(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
        if status:
            raise BuildError(f"NVRTC cannot compile a kernel for {architecture}: {log or _error(library, status)}")
        return _text(library, program, "PTX" if architecture.startswith("compute_") else "CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def nvrtc() -> ctypes.CDLL:
    """Load NVRTC from NVIDIA's packages (torch with CUDA installs them) or from the system's toolkit."""
    candidates = [*_packaged(), ctypes.util.find_library("nvrtc")]
    for candidate in candidates:
        if candidate:
            try:
                if isinstance(candidate, Path):  # NVIDIA's packages: NVRTC may not find this library beside itself
                    for builtins in candidate.parent.glob("libnvrtc-builtins.so*"):
                        ctypes.CDLL(str(builtins))
                return ctypes.CDLL(str(candidate))
            except OSError:
                continue
    raise BuildError(f"NVRTC, which compiles the CUDA kernels, is missing: {install(13)}")


def _packaged() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return [path for folder in folders for path in sorted(folder.rglob("libnvrtc.so*"), reverse=True)]


def _path(source: str, architecture: str) -> Path:
    parts = [source, architecture, "{}.{}".format(*version()), *OPTIONS, _sources()]
    return cache_folder() / f"cuda-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.cubin"


@cache
def _sources() -> str:
    return "|".join(
        f"{path.name}\n{path.read_text()}" for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cu*")])
    )


def architectures() -> list[str]:
    """Return the names of the architectures that NVRTC compiles for, without the suffixes `a` and `f`."""
    count = ctypes.c_int()
    _check(nvrtc(), nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    numbers = (ctypes.c_int * count.value)()
    _check(nvrtc(), nvrtc().nvrtcGetSupportedArchs(numbers))
    return [f"sm_{number}" for number in numbers]


def target(capability: tuple[int, int]) -> str:
    """Return the architecture to compile for, such as `sm_90`, for a GPU of this compute capability.

    If NVRTC does not know the GPU, the result is the newest older architecture as PTX, such as `compute_120`.
    """
    own, known = 10 * capability[0] + capability[1], [int(name.removeprefix("sm_")) for name in architectures()]
    if own in known:  # the suffix `a` also allows features that only this architecture has
        return f"sm_{own}{'a' if own >= 100 else ''}"
    older = [number for number in known if number < own]
    if not older:
        raise BuildError(f"NVRTC {'.'.join(map(str, version()))} compiles for no GPU as old as sm_{own}")
    return f"compute_{max(older)}"


@cache
def version() -> tuple[int, int]:
    """Return the version of NVRTC as (major, minor)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc(), nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, content))
    return content.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise BuildError(f"NVRTC, which compiles the CUDA kernels, failed: {_error(library, status)}")


def _error(library: ctypes.CDLL, status: int) -> str:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return str(library.nvrtcGetErrorString(status).decode())
