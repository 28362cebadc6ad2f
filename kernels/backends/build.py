"""Find the library of the CPU kernels: in the package, where a wheel has it, or compiled at first use and cached.

A wheel has a library for each instruction set in compilation.LEVELS; the newest that the processor has is loaded. If
there is none, as in a checkout, the kernels are compiled for this processor. All compilers give the same bits.

A library's name contains a hash of its sources and flags, and a cached library's also one of the processor. So an edit
triggers a rebuild, machines of different types that share a home directory use separate files, and a machine without a
compiler can use a library that another machine built. One process builds at a time, under a lock. The library is
written under another name and renamed when it is complete. The file ends with its name, and with the hash of its
content: a file that was renamed, or half a file (after a full disk or a power failure), is never loaded.
"""

import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TextIO

from fewbits.common.process import locked
from fewbits.kernels.backends import compilation

# No trial uses products with a chosen accumulator, so their source is listed here and not in compilation.py, which is
# part of every trial's id.
UNITS = (*compilation.UNITS, "cpu_accumulate.cpp")
PREBUILT = Path(__file__).parents[1] / "prebuilt"  # the folder of a wheel's libraries; setup.py fills it

NO_LOCKS = (
    "two processes that compile at the same time may write the same file: start one process first, or set "
    "FEWBITS_CACHE to a folder on another file system"
)


class BuildError(RuntimeError):
    """Raised if the kernels could not be compiled; the message says why."""


def compiler() -> tuple[str, ...] | None:
    """Return the command of the C++ compiler: $CXX (for example "ccache g++") if set, else g++ or c++."""
    requested = shlex.split(os.environ.get("CXX", ""))
    candidates = [requested] if requested else [["g++"], ["c++"]]
    return next(((path, *options) for name, *options in candidates if (path := shutil.which(name))), None)


def no_compiler() -> str:
    requested = os.environ.get("CXX")
    return f"no C++ compiler found: {f'CXX={requested} is not installed' if requested else 'install g++, or set CXX'}"


def cache_folder() -> Path:
    if folder := os.environ.get("FEWBITS_CACHE"):
        return Path(folder)
    if parent := os.environ.get("XDG_CACHE_HOME"):
        return Path(parent, "fewbits")
    try:
        return Path.home() / ".cache" / "fewbits"
    except RuntimeError:
        text = "this user has no home directory: set FEWBITS_CACHE to a folder for the compiled kernels"
        raise BuildError(text) from None


def library_path() -> Path:
    """Return the path of the library: the package's own for this processor, or one in the cache, which may not exist.

    FEWBITS_CPU_ARCH chooses another instruction set than the newest that the processor has and the package contains.
    """
    requested, flags = compilation.requested(), cpu_flags()
    for name, level in compilation.LEVELS.items():  # the newest first
        fits = name == requested if requested else level.needs <= flags
        if fits and is_whole(shipped := PREBUILT / file_name(name)):
            return shipped
    return cache_folder() / file_name(requested)


def file_name(architecture: str | None) -> str:
    """Return the name of the library for an architecture as in `compilation.requested`."""
    parts = [f"{path.name}\n{path.read_text()}" for path in compilation.cpu_sources()]
    parts += compilation.flags(architecture)
    parts += [] if architecture in compilation.LEVELS else [_processor()]
    level = f"{architecture}-" if architecture in compilation.LEVELS else ""
    return f"cpu-{level}{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"


def is_whole(library: Path) -> bool:
    """Tell whether the file is complete and was compiled from the sources that its name states.

    The dynamic loader ignores what follows a library in its file.
    """
    try:
        content = library.read_bytes()
    except OSError:
        return False
    sealed = hashlib.sha256(content[:-32]).digest() == content[-32:]
    return sealed and content[:-32].endswith(library.name.encode())


def content_of(file: Path) -> bytes:
    """Return what `cached` got from `make`: the file without its name and the hash at its end."""
    return file.read_bytes()[: -32 - len(file.name.encode())]


def available() -> bool:
    """Tell whether there is a library, or a compiler that can make one; `build` says why if it then fails."""
    try:
        return compiler() is not None or library_path().exists()
    except BuildError:
        return True


def build() -> Path:
    """Return the path of the library, which is compiled if there is no complete one.

    Raise BuildError if the compiler fails or there is none.
    """
    return _built(library_path(), compilation.requested())


def build_level(level: str) -> Path:
    """Compile the library for one of compilation.LEVELS, if it is not cached, and return its path in the cache."""
    return _built(cache_folder() / file_name(level), level)


def _built(target: Path, architecture: str | None) -> Path:
    command = compiler()
    if command is None and not is_whole(target):
        raise BuildError(f"{target} is damaged, and {no_compiler()}" if target.exists() else no_compiler())
    return cached(target, lambda: _compiled(command or (), target, architecture))


def cached(target: Path, make: Callable[[], bytes]) -> Path:
    """Return the path `target`; if that file is missing or incomplete, first write the bytes that `make` returns.

    If several processes call this at once, only one of them calls `make`, and the others wait.
    """
    if not is_whole(target):
        with open_lock(target.with_suffix(".lock")) as lock, locked(lock, NO_LOCKS):
            if not is_whole(target):
                content, unfinished = make() + target.name.encode(), target.with_suffix(".tmp")
                with open(unfinished, "wb") as file:
                    file.write(content + hashlib.sha256(content).digest())
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.rename(target)
    return target


def open_lock(lock: Path) -> TextIO:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        return lock.open("w")
    except OSError as error:
        raise BuildError(f"cannot write to {lock.parent} ({error}): set FEWBITS_CACHE to a writable folder") from None


def _compiled(command: tuple[str, ...], target: Path, architecture: str | None) -> bytes:
    print(
        f"fewbits: compiling the CPU kernels into {target.parent}; this takes some minutes and is repeated only if the "
        "sources, the flags or the processor change",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        return compile_in(Path(folder), command, compilation.flags(architecture)).read_bytes()


def compile_in(folder: Path, command: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """Compile the library in the given folder with the given compiler command and flags; return the library's path."""
    units = [(str(compilation.SOURCES / unit), str(folder / f"{unit}.o")) for unit in UNITS]
    _run([[*command, *flags, "-c", source, "-o", result] for source, result in units])
    library = folder / "library.so"
    _run([[*command, "-shared", *(result for _, result in units), "-o", str(library)]])  # without OpenMP: see `load`
    load(library)
    return library


def load(library: Path) -> ctypes.CDLL:
    """Load torch's OpenMP runtime and then the library, which finds the runtime's functions because they are global.

    The library does not name the runtime: a process that had loaded a second one would have twice the threads, which
    compete for the cores, because waiting threads spin. Raise BuildError if the library cannot be loaded.
    """
    try:
        ctypes.CDLL(_openmp(), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"cannot load the compiled library: {error}") from None


def _run(steps: list[list[str]]) -> None:
    """Run commands in parallel; raise BuildError with the output of the first one that fails."""
    running = [subprocess.Popen(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for step in steps]
    outputs = [process.communicate()[0].decode(errors="replace") for process in running]
    for step, process, output in zip(steps, running, outputs, strict=True):
        if process.returncode:
            raise BuildError(f"{' '.join(step)} failed with status {process.returncode}:\n{output}")


@cache
def _openmp() -> str:
    """Return the path of torch's OpenMP runtime; if torch uses the system's, or is not installed, that one's name."""
    spec = importlib.util.find_spec("torch")
    package = Path(spec.origin).parent if spec and spec.origin else Path()
    candidates = [*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")] if spec else []
    return str(min(candidates, default="libgomp.so.1"))


def _processor() -> str:
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = [line for line in _cpuinfo() if line.startswith(wanted)]
    return "\n".join(dict.fromkeys(lines)) if lines else f"{platform.machine()} {platform.processor()}"


def cpu_flags() -> frozenset[str]:
    """Return the flags of the processor's instruction sets; empty if it is not an x86-64 under Linux."""
    return frozenset(next((line for line in _cpuinfo() if line.startswith("flags")), "").split())


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


if __name__ == "__main__":
    if compiler() is None:
        print(f"{no_compiler()}; the reference backend will be used", file=sys.stderr)
    else:
        print(build())
