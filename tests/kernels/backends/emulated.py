"""Run the CUDA backend on the CPU: its real host code, and its kernel sources on the SIMT emulator of simt/."""

import ctypes
import shlex
import subprocess
from functools import cache
from pathlib import Path

import torch

from fewbits.kernels.backends import build, compilation
from fewbits.kernels.backends.constants import flat
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.variants import DTYPE_NAMES, Variant, spec_of
from fewbits.kernels.quantizer import Quantizer

SIMT = Path(__file__).parent / "simt"
KERNELS = {
    "quantize.cu": ("quantize", "measure", "extent", "weigh"),
    "decode.cu": ("decode",),
    "weights.cu": ("gaussian_noise", "uniform_noise", "sample_weight", "sample_weight_backward"),
}
NAMES = tuple(DTYPE_NAMES.values())
SPEC = ctypes.c_uint32 * len(flat(spec_of(Quantizer(), -1)))
FLAGS = "-std=c++17 -O1 -fPIC -shared -ffp-contract=off -fno-trapping-math -fno-math-errno"


class _Variant(ctypes.Structure):  # csrc/spec.cuh
    _fields_ = [
        ("shape", ctypes.c_int32 * 3),
        ("count", ctypes.c_int32),
        ("specs", SPEC * 2),
    ]


class EmulatedLauncher:
    """A launcher that runs each launch at once, without streams, and records it in `launches`.

    Each launch runs its threads in a different order, so that a race changes the result.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.launches: list[Variant] = []

    def launch(self, variant: Variant, blocks: int, call: ctypes.Structure, device: torch.device) -> None:
        assert device.type == "cpu"
        self.launches.append(variant)
        data = _Variant((ctypes.c_int32 * 3)(*variant.shape), len(variant.specs))
        for i, spec in enumerate(variant.specs):
            data.specs[i] = SPEC(*flat(spec))
        run = getattr(self._library, f"simt_{variant.file.removesuffix('.cu')}")
        kernel = KERNELS[variant.file].index(variant.kernel)
        self._library.simt_shuffle(ctypes.c_uint64(len(self.launches)))
        run(kernel, *map(NAMES.index, variant.dtypes), ctypes.byref(data), blocks, ctypes.byref(call))


@cache
def compiled(source: Path, folder: Path) -> ctypes.CDLL:
    """Compile a library of kernels for the emulator."""
    command, library = build.compiler(), folder / f"{source.stem}.so"
    assert command is not None
    flags = [*shlex.split(FLAGS), f"-I{compilation.SOURCES}", f"-I{SIMT}"]
    subprocess.run([*command, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def emulated_device(folder: Path) -> tuple[Device, EmulatedLauncher]:
    launcher = EmulatedLauncher(compiled(SIMT / "emulate.cpp", folder))
    return Device(launcher), launcher
