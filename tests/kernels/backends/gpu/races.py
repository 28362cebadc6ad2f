"""Run classes of CUDA kernels on the emulator under ThreadSanitizer, which reports races that change no result.

ThreadSanitizer has to be loaded before Python, so `run` starts a process of its own for the classes. For what counts
as a race, see simt/sanitizer.h.
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch

from fewbits.kernels.backends import build
from fewbits.kernels.backends.compilation import SOURCES
from fewbits.kernels.backends.gpu import tiles
from tests.kernels.backends.gpu.emulated import SIMT, emulated_device, library
from tests.kernels.backends.gpu.test_cuda_kernels_fit import CLASSES, input_of

OPTIONS = ("-fsanitize=thread", "-g")
RACE = 66  # the exit status of a process that ThreadSanitizer ends at the first race
DONE = "class:"  # begins the line that a process prints for each class


@dataclass(frozen=True)
class Outcome:
    race: bool
    reached: dict[str, list[str]]  # class → the barriers that its threads reached
    output: str


@cache
def _sanitizer() -> str:
    """Return the path of ThreadSanitizer's library; empty if the compiler has none."""
    command = build.compiler()
    named = [*(command or ("false",)), "-print-file-name=libtsan.so"]
    path = subprocess.run(named, capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else ""


@cache
def unavailable() -> str | None:
    """Return the reason why ThreadSanitizer cannot be used on this machine, or None if it can."""
    if not _sanitizer():
        return "there is no C++ compiler with ThreadSanitizer (libtsan)"
    tried = subprocess.run([sys.executable, "-c", ""], env=_environment(), capture_output=True, text=True)
    return f"ThreadSanitizer does not work here: {tried.stderr.strip()}" if tried.returncode else None


def _environment() -> dict[str, str]:
    options = f"halt_on_error=1 exitcode={RACE} report_signal_unsafe=0"
    return {**os.environ, "LD_PRELOAD": _sanitizer(), "TSAN_OPTIONS": options, "OMP_NUM_THREADS": "1"}


def run(classes: Iterable[str], without: str = "") -> Outcome:
    """Run classes of kernels until ThreadSanitizer reports a race; without: the name of a barrier to remove."""
    library(SIMT / "emulate.cpp", *OPTIONS)  # compiled outside ThreadSanitizer
    command = [sys.executable, "-m", __spec__.name, without, *classes]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True)
    if done.returncode not in (0, RACE):
        raise RuntimeError(f"the process failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    lines = [line.removeprefix(DONE).split("|") for line in done.stdout.splitlines() if line.startswith(DONE)]
    return Outcome(done.returncode == RACE, {name: names.split() for name, names in lines}, done.stderr)


def barriers() -> Iterator[str]:
    """Yield the name, FILE:LINE, of each barrier in the sources of the CUDA kernels."""
    for path in sorted(SOURCES.glob("*.cu*")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if "__syncthreads()" in line.partition("//")[0]:
                yield f"{path.name}:{number}"


def _child(without: str, classes: Iterable[str]) -> None:
    torch.set_num_threads(1)
    tiles.FEWEST_STRIPS = 1
    device, launcher = emulated_device(*OPTIONS)
    emulator = launcher._library
    emulator.simt_reached.restype = ctypes.c_char_p
    emulator.simt_remove(without.encode())
    for name in classes:
        CLASSES[name][0](device, input_of(name, 136))
        print(f"{DONE}{name}|{emulator.simt_reached().decode()}", flush=True)


if __name__ == "__main__":  # the process that `run` starts
    _child(sys.argv[1], sys.argv[2:])
