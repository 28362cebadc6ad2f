"""Compile the CPU kernels at first use, and cache the library in a file whose name contains a hash of its sources.

The hash covers sources, flags and processor, but not the compiler, because all compilers give the same bits. So an edit
triggers a rebuild, machines of different types that share a home directory use separate files, and a machine without a
compiler can use a library that another machine built. One process builds at a time, under a lock. The library is
written under another name and renamed when it is complete. The file ends with its name, which contains the hash of its
sources, and with the hash of its content: a file that was renamed, or half a file (after a full disk or a power
failure), is never loaded.
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

NO_LOCKS = (
    "two processes that compile at the same time may write the same file: start one process first, or set "
    "FEWBITS_CACHE to a folder on another file system"
)


class BuildError(RuntimeError):
    """Raised if the kernels could not be compiled; the message says why."""


def compiler() -> tuple[str, ...] | None:
    """Return the command of the C++ compiler: $CXX (for example "ccache g++") if set, else g++, c++ or clang++."""
    requested = shlex.split(os.environ.get("CXX", ""))
    candidates = [requested] if requested else [["g++"], ["c++"], ["clang++"]]
    return next(((path, *options) for name, *options in candidates if (path := shutil.which(name))), None)


def no_compiler() -> str:
    requested = os.environ.get("CXX")
    return f"no C++ compiler found: {f'CXX={requested} is not installed' if requested else 'install g++, or set CXX'}"


def cache_folder() -> Path:
    if folder := os.environ.get("FEWBITS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fewbits"


def library_path() -> Path:
    """Return the path of the compiled library, which may not exist yet."""
    parts = [f"{path.name}\n{path.read_text()}" for path in compilation.cpu_sources()]
    openmp = _openmp_of_torch()
    parts += [*compilation.flags(), openmp.name if openmp else "", _processor()]
    return cache_folder() / f"cpu-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"


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


def build() -> Path:
    """Compile the library if no complete one is cached, and return its path.

    Raise BuildError if the compiler fails or there is none.
    """
    target, command = library_path(), compiler()
    if command is None and not is_whole(target):
        raise BuildError(f"{target} is damaged, and {no_compiler()}" if target.exists() else no_compiler())
    return cached(target, lambda: _compiled(command or (), target))


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


def _compiled(command: tuple[str, ...], target: Path) -> bytes:
    print(
        f"fewbits: compiling the CPU kernels into {target.parent}; this takes some minutes and is repeated only if the "
        "sources, the flags or the processor change",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        return compile_in(Path(folder), command).read_bytes()


def compile_in(folder: Path, command: tuple[str, ...]) -> Path:
    """Compile the library in the given folder with the given compiler command; return the library's path."""
    units = [(str(compilation.SOURCES / unit), str(folder / f"{unit}.o")) for unit in UNITS]
    _run([[*command, *compilation.flags(), "-c", source, "-o", result] for source, result in units])
    # Link torch's OpenMP runtime, so that the process has only one runtime. Two runtimes would have twice the threads,
    # which compete for the cores, because waiting threads spin.
    openmp, library = _openmp_of_torch(), folder / "library.so"
    link = [str(openmp) if openmp else "-fopenmp"]
    _run([[*command, "-shared", *(result for _, result in units), *link, "-o", str(library)]])
    load(library)
    return library


def load(library: Path) -> ctypes.CDLL:
    """Load torch's OpenMP runtime and then the library, which refers to that runtime only by its file name.

    So the library contains no path of a Python environment, and all environments of a user can share it. Raise
    BuildError if the library cannot be loaded.
    """
    try:
        if openmp := _openmp_of_torch():
            ctypes.CDLL(str(openmp))
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
def _openmp_of_torch() -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    candidates = sorted([*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")])
    return candidates[0] if candidates else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


if __name__ == "__main__":
    if compiler() is None:
        print(f"{no_compiler()}; the reference backend will be used", file=sys.stderr)
    else:
        print(build())
