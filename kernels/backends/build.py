"""Compiles the CPU kernels at first use and keeps the library under a name that says what it was made of.

The name is a hash of sources, flags and processor, not of the compiler, whose choice changes no bit: an edit rebuilds,
nodes of different types that share a home directory each find their own, and one without a compiler finds what another
built. One process builds under a lock; the file appears whole, by a rename, and ends with the hash of what comes
before: a disk may have been full or a node have lost its power, and to run half a library is to crash.
This module imports neither torch nor numpy, so that `fewbits doctor` may ask it.
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
from functools import cache
from pathlib import Path
from typing import TextIO

from fewbits.common.locks import locked

SOURCES = Path(__file__).parents[1] / "csrc"
UNITS = (
    "cpu.cpp",
    "cpu_bf16.cpp",
    "cpu_fp16.cpp",
    "cpu_fp32.cpp",
    "cpu_packed.cpp",
    "cpu_noise.cpp",
    "cpu_gemm.cpp",
)

# -fno-trapping-math and -fno-math-errno let comparisons and roots inside loops vectorise; -ffp-contract=off keeps
# a*b+c at two roundings, as the reference has them. Nothing here may reorder floating point.
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
NO_LOCKS = "processes that compile at the same time can disturb each other: start one first, or set FEWBITS_CACHE"
NATIVE = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "aarch64": ("-mcpu=native",)}
ARCHITECTURE = "FEWBITS_CPU_ARCH"  # environment variable: what -march is given instead, x86-64-v3 for example


class BuildError(RuntimeError):
    """The compiler was there and failed."""


def compiler() -> tuple[str, ...] | None:
    """The C++ compiler, as a command begins: $CXX ("ccache g++", say) where it is set, else g++, c++ or clang++."""
    asked = shlex.split(os.environ.get("CXX", ""))
    candidates = [asked] if asked else [["g++"], ["c++"], ["clang++"]]
    return next(((path, *options) for name, *options in candidates if (path := shutil.which(name))), None)


def no_compiler() -> str:
    asked = os.environ.get("CXX")
    return f"no C++ compiler found: {f'CXX={asked} is no program here' if asked else 'install g++, or set CXX'}"


def flags() -> tuple[str, ...]:
    """Return the compiler's flags: for this processor, or for the one that FEWBITS_CPU_ARCH names."""
    native = NATIVE.get(platform.machine(), ())
    asked = os.environ.get(ARCHITECTURE)
    return FLAGS + ((f"-march={asked}", *native[1:]) if asked else native)


def cache_folder() -> Path:
    if folder := os.environ.get("FEWBITS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fewbits"


def library_path() -> Path:
    """Where the compiled library lies, or would."""
    parts = [f"{path.name}\n{path.read_text()}" for path in sorted(SOURCES.glob("*.[hc]*"))]
    parts += [*flags(), str(_openmp_of_torch()), _processor()]
    return cache_folder() / f"cpu-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"


def is_whole(library: Path) -> bool:
    """Whether the file is as it was built: it ends with its hash, which the loader of libraries passes over."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def build() -> Path:
    """The library's path, after compiling it if need be. BuildError if the compiler fails, or there is none."""
    target = library_path()
    if is_whole(target):
        return target
    command = compiler()
    if command is None:
        raise BuildError(f"{target} is damaged, and {no_compiler()}" if target.exists() else no_compiler())
    with opened(target.with_suffix(".lock")) as lock, locked(lock, NO_LOCKS):
        if not is_whole(target):
            folder = target.with_suffix(".build")
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed: who has the lock is alone
            folder.mkdir()
            try:
                _compile(command, folder, target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    return target


def opened(lock: Path) -> TextIO:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        return lock.open("w")
    except OSError as error:
        raise BuildError(
            f"nothing can be kept in {lock.parent} ({error}): set FEWBITS_CACHE to a folder for it"
        ) from None


def complaint_of(command: tuple[str, ...]) -> str | None:
    """What keeps this compiler from making libraries with our flags, tried on a line of code; None if it can."""
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "try.cpp"), Path(folder, "try.so")
        source.write_text("#include <algorithm>\nint largest(int a, int b) { return std::max(a, b); }\n")
        try:
            _run([[*command, *flags(), "-shared", str(source), "-o", str(result)]])
            _load(result)
        except (BuildError, OSError) as error:
            return str(error)
    return None


def _compile(command: tuple[str, ...], folder: Path, target: Path) -> None:
    objects = [str(folder / f"{unit}.o") for unit in UNITS]
    _run(
        [
            [*command, *flags(), "-c", str(SOURCES / unit), "-o", result]
            for unit, result in zip(UNITS, objects, strict=True)
        ]
    )
    # One OpenMP runtime in the process, torch's: two would keep twice the threads, spinning against each other.
    openmp = _openmp_of_torch()
    link = [str(openmp), f"-Wl,-rpath,{openmp.parent}"] if openmp else ["-fopenmp"]
    linked = folder / target.name
    _run([[*command, "-shared", *objects, *link, "-o", str(linked)]])
    _load(linked)
    digest = hashlib.sha256(linked.read_bytes()).digest()
    with open(linked, "ab") as file:
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())
    linked.rename(target)


def _run(steps: list[list[str]]) -> None:
    """Commands beside each other. BuildError, with what it said, for the first that fails."""
    running = [subprocess.Popen(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for step in steps]
    said = [process.communicate()[0].decode(errors="replace") for process in running]
    for step, process, output in zip(steps, running, said, strict=True):
        if process.returncode:
            raise BuildError(f"{' '.join(step)} failed with status {process.returncode}:\n{output}")


def _load(library: Path) -> None:
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"what the compiler made is no library: {error}") from None


@cache
def _openmp_of_torch() -> Path | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    found = sorted([*package.glob("lib/libgomp*.so*"), *package.parent.glob("torch.libs/libgomp*.so*")])
    return found[0] if found else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


if __name__ == "__main__":
    if compiler() is None:
        print(f"{no_compiler()}; the reference will serve", file=sys.stderr)
    else:
        print(build())
