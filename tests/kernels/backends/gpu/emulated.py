"""Run the CUDA backend on the CPU: its unchanged host code, and its kernel sources on the SIMT emulator in simt/."""

import ctypes
import hashlib
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

from fewbits.kernels.backends import build, compilation
from fewbits.kernels.backends.constants import flat
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.tiles import STATIC_SHARED
from fewbits.kernels.backends.gpu.variants import DTYPE_NAMES, Kernel, Variant, spec_of
from fewbits.kernels.quantizer import Quantizer

SIMT = Path(__file__).parent / "simt"
KERNELS = {
    "quantize.cu": ("quantize", "measure", "extent", "weigh", "quantize_strip"),
    "decide.cu": ("decide",),
    "observe.cu": ("observe",),
    "decode.cu": ("decode",),
    "layers.cu": (
        *("norm", "norm_backward", "norm_weights", "entropy", "entropy_backward", "rotate"),
        *("squared_relu", "squared_relu_backward", "gelu", "gelu_backward", "swiglu", "swiglu_backward"),
    ),
    "weights.cu": ("gaussian_noise", "uniform_noise", "sample_weight", "sample_weight_backward"),
}
SHARED = (227 << 10) - STATIC_SHARED  # bytes of dynamic shared memory that a CTA of an H100 can have
NAMES = tuple(DTYPE_NAMES.values())
SPEC = ctypes.c_uint32 * len(flat(spec_of(Quantizer(), -1)))
FLAGS = "-std=c++17 -O1 -fPIC -shared -ffp-contract=off -fno-trapping-math -fno-math-errno"
# One process loads several of these libraries, and each must use its own copies of the inline variables.
FLAGS += " -fno-gnu-unique -Wl,-Bsymbolic"


class _Variant(ctypes.Structure):  # csrc/spec.cuh
    _fields_ = [
        ("shape", ctypes.c_int32 * 3),
        ("count", ctypes.c_int32),
        ("specs", SPEC * 2),
    ]


class EmulatedLauncher:
    """A launcher that runs each launch on the emulator before it returns, and records it in `launches`.

    Streams are ignored. Each launch runs its threads in a different order, so that a race changes the result.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._library.simt_atomics.restype = ctypes.c_uint64
        self.launches: list[Variant] = []
        self.shared: list[int] = []  # bytes of dynamic shared memory of each launch
        self.atomics: list[int] = []  # number of atomic operations of each launch
        self.room = SHARED

    def kernel(self, variant: Variant, device: torch.device) -> Kernel:
        assert device.type == "cpu"
        data = _Variant((ctypes.c_int32 * 3)(*variant.shape), len(variant.specs))
        for i, spec in enumerate(variant.specs):
            data.specs[i] = SPEC(*flat(spec))
        run = getattr(self._library, f"simt_{variant.file.removesuffix('.cu')}")
        kernel = KERNELS[variant.file].index(variant.kernel)
        dtypes = [NAMES.index(name) for name in variant.dtypes]

        def launch(blocks: int, shared: int, arguments: int) -> None:
            self.launches.append(variant)
            self.shared.append(shared)
            self._library.simt_shuffle(ctypes.c_uint64(len(self.launches)))
            call = ctypes.c_void_p.from_address(arguments)
            before = self._library.simt_atomics()
            run(kernel, *dtypes, ctypes.byref(data), blocks, shared, call)
            self.atomics.append(self._library.simt_atomics() - before)

        return launch

    def shared_memory(self, device: torch.device) -> int:
        return self.room


@cache
def compiled(source: Path, *options: str) -> ctypes.CDLL:
    """Compile a C++ source for the emulator to a library, which stays in the user's cache, and load it."""
    return ctypes.CDLL(str(library(source, *options)))


def library(source: Path, *options: str) -> Path:
    return _library(source.stem, f'#include "{source}"\n', [*SIMT.glob("*"), *source.parent.glob("*")], options)


def _library(name: str, text: str, beside: Iterable[Path], options: Sequence[str]) -> Path:
    """Compile a C++ text; return the path of the library, which is in the user's cache under a hash of its sources.

    beside: all files that the text includes, except the files of csrc/.
    """
    command = build.compiler()
    assert command is not None
    flags = [*shlex.split(FLAGS), f"-I{compilation.SOURCES}", f"-I{SIMT}", *options]
    sources = {*compilation.SOURCES.glob("*"), *beside}
    content = [f"{path.name}\n{path.read_text()}" for path in sorted(sources) if path.is_file()]
    key = hashlib.sha256("|".join([text, *content, *flags]).encode()).hexdigest()[:16]

    def make() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            source, result = Path(folder, "source.cpp"), Path(folder, "library.so")
            source.write_text(text)
            subprocess.run([*command, str(source), *flags, "-o", str(result)], check=True)
            return result.read_bytes()

    return build.cached(build.cache_folder() / f"simt-{name}-{key}.so", make)


def emulated_device(*options: str) -> tuple[Device, EmulatedLauncher]:
    launcher = EmulatedLauncher(compiled(SIMT / "emulate.cpp", *options))
    return Device(launcher), launcher


class ConstantLauncher:
    """A launcher that compiles each kernel with its variant's constants, as NVRTC does, and runs it on the emulator."""

    def __init__(self) -> None:
        self.launches: list[Variant] = []

    def kernel(self, variant: Variant, device: torch.device) -> Kernel:
        run = _with_constants(variant)

        def launch(blocks: int, shared: int, arguments: int) -> None:
            self.launches.append(variant)
            run.simt_shuffle(ctypes.c_uint64(len(self.launches)))
            run.simt_run(blocks, shared, ctypes.c_void_p.from_address(arguments))

        return launch

    def shared_memory(self, device: torch.device) -> int:
        return SHARED


@cache
def _with_constants(variant: Variant) -> ctypes.CDLL:
    calls = {
        "quantize.cu": "Call",
        "decide.cu": "DecideCall",
        "observe.cu": "ObserveCall",
        "decode.cu": "DecodeCall",
        "layers.cu": "LayerCall",
        "weights.cu": "WeightCall",
    }
    dtypes = ", ".join(("fb::FB_DTYPE", "fb::FB_OTHER")[: len(variant.dtypes)])
    text = f"""#include "simt.h"
{variant.source()}
extern "C" void simt_shuffle(uint64_t seed) {{ simt::shuffle = seed; }}
extern "C" void simt_run(unsigned blocks, unsigned shared, const fb::{calls[variant.file]} *call) {{
  simt::run(blocks, fb::shape().threads, shared, [&] {{ fb::FB_KERNEL<{dtypes}>(*call); }});
}}
"""
    return ctypes.CDLL(str(_library(f"constant-{variant.kernel}", text, SIMT.glob("*"), ())))
