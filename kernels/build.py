"""Compiles the CPU kernels at first use and keeps the library under a name that says what it was made of.

The name is a hash of sources, flags and processor, not of the compiler, whose choice changes no bit: an edit rebuilds,
nodes of different types that share a home directory each find their own, and one without a compiler finds what another
built. One process builds under a lock; the file appears whole, by a rename.
This module imports neither torch nor numpy, so that `fewbits doctor` may ask it.
"""

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
UNITS = ("cpu.cpp", "cpu_noise.cpp")

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
NATIVE = {"x86_64": ("-march=native", "-mprefer-vector-width=512"), "aarch64": ("-mcpu=native",)}


class BuildError(RuntimeError):
    """The compiler was there and failed."""


def compiler() -> str | None:
    """The C++ compiler: $CXX, g++, c++ or clang++, whichever is found first."""
    candidates = [os.environ.get("CXX"), "g++", "c++", "clang++"]
    return next((path for name in candidates if name and (path := shutil.which(name))), None)


def flags() -> tuple[str, ...]:
    return FLAGS + NATIVE.get(platform.machine(), ())


def cache_folder() -> Path:
    if folder := os.environ.get("FEWBITS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fewbits"


def library_path() -> Path:
    """Where the compiled library lies, or would."""
    parts = [f"{path.name}\n{path.read_text()}" for path in sorted(SOURCES.glob("*.[hc]*"))]
    parts += [*flags(), str(_openmp_of_torch()), _processor()]
    return cache_folder() / f"cpu-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:16]}.so"


def build() -> Path:
    """The library's path, after compiling it if need be. BuildError if the compiler fails, or there is none."""
    target = library_path()
    if target.exists():
        return target
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler found: install g++, or set CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
                _compile(command, Path(folder), target)
    return target


def _compile(command: str, folder: Path, target: Path) -> None:
    objects = [folder / f"{unit}.o" for unit in UNITS]
    running = [
        (step, subprocess.Popen(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for unit, result in zip(UNITS, objects, strict=True)
        for step in [[command, *flags(), "-c", str(SOURCES / unit), "-o", str(result)]]
    ]
    outputs = [process.communicate()[0] for _, process in running]
    for (step, process), output in zip(running, outputs, strict=True):
        _check(step, process.returncode, output)
    # One OpenMP runtime in the process, torch's: two would keep twice the threads, spinning against each other.
    openmp = _openmp_of_torch()
    link = [str(openmp), f"-Wl,-rpath,{openmp.parent}"] if openmp else ["-fopenmp"]
    linked = folder / target.name
    step = [command, "-shared", *map(str, objects), *link, "-o", str(linked)]
    result = subprocess.run(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    _check(step, result.returncode, result.stdout)
    linked.rename(target)


def _check(step: list[str], status: int, output: str) -> None:
    if status:
        raise BuildError(f"{' '.join(step)} failed with status {status}:\n{output}")


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
        print("no C++ compiler found, so the reference will serve: install g++ for the fast kernels", file=sys.stderr)
    else:
        print(build())
