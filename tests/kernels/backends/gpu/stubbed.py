"""Run the CUDA backend on real CuPy without a GPU, with stand-ins for NVIDIA's driver and for NVRTC.

The stand-ins (stub/) are libraries with the names and functions of the real ones. CuPy loads and launches kernels
through the driver's stand-in, which runs each launch on the SIMT emulator with the launch's arguments. All code of
fewbits runs unchanged. A CPU build of torch has no CUDA, so the class `Torch` replaces the few functions of torch.cuda
that fewbits calls.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fewbits.kernels.backends import build
from fewbits.kernels.backends.gpu import cubins, cuda
from fewbits.kernels.backends.gpu.device import Device
from tests.kernels.backends.gpu.emulated import SIMT, library

STUB = Path(__file__).parent / "stub"


class Launch(ctypes.Structure):  # stub/driver.cpp
    _fields_ = [
        ("device", ctypes.c_int32),
        ("captured", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("thread", ctypes.c_uint64),
        ("kernel", ctypes.c_char * 32),
    ]


@dataclass
class Torch:
    """Replaces the functions of torch.cuda that fewbits calls, by this object's fields or by the driver's stand-in."""

    driver: ctypes.CDLL
    streams: dict[int, int] = field(default_factory=dict)  # the current stream by device index; 0: default stream
    capturing: bool = False
    capability: tuple[int, int] = (9, 0)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: max(self.driver.stub_current_device(), 0))
        patch.setattr(torch.cuda, "get_device_capability", lambda index=None: self.capability)
        patch.setattr(torch.cuda, "get_device_name", lambda index=None: "stand-in")
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.cuda, "synchronize", lambda index=None: None)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.streams.get(index, 0), raising=False)


@dataclass
class Stub:
    driver: ctypes.CDLL
    nvrtc: ctypes.CDLL
    torch: Torch
    device: Device

    @property
    def launches(self) -> list[Launch]:
        every = [Launch() for _ in range(self.driver.stub_launch_count())]
        for i, launch in enumerate(every):
            self.driver.stub_launch(i, ctypes.byref(launch))
        return every

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Let torch and the driver report that the current stream is being captured, as within torch.cuda.graph."""
        self.torch.capturing = True
        self.driver.stub_set_capturing(1)
        try:
            yield
        finally:
            self.torch.capturing = False
            self.driver.stub_set_capturing(0)


def unavailable() -> str | None:
    """Return the reason why the stand-ins cannot be used on this machine, or None if they can."""
    if torch.cuda.is_available():
        return "there is a real driver: run the tests marked gpu"
    if build.compiler() is None:
        return "there is no C++ compiler for the emulator"
    return None if find_spec("cupy") else "CuPy is not installed"


@cache
def stand_ins() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Load the stand-ins for the driver and for NVRTC; libraries loaded later find the first one as libcuda.so.1."""
    emulator = library(SIMT / "emulate.cpp")
    options = (str(emulator), f"-Wl,-rpath,{emulator.parent}")
    driver = ctypes.CDLL(str(library(STUB / "driver.cpp", "-Wl,-soname,libcuda.so.1", *options)), ctypes.RTLD_GLOBAL)
    folder = build.cache_folder() / "stub-nvrtc"
    packaged = folder / "nvidia" / "stub" / "libnvrtc.so.13"
    packaged.parent.mkdir(parents=True, exist_ok=True)
    builtins = "libnvrtc-builtins.so.stub"
    for link, built in (
        (packaged, library(STUB / "nvrtc.cpp")),
        (packaged.with_name(builtins), library(STUB / "nvrtc.cpp", f"-Wl,-soname,{builtins}")),
    ):
        if not link.is_symlink() or link.resolve() != built.resolve():
            link.unlink(missing_ok=True)
            link.symlink_to(built)
    return driver, ctypes.CDLL(str(packaged))


@contextmanager
def stubbed(patch: pytest.MonkeyPatch, cache_folder: Path) -> Iterator[Stub]:
    """Use the stand-ins for NVIDIA's driver, for NVRTC and for torch.cuda while the `with` block runs; yield them.

    cache_folder: the folder in which compiled kernels (cubins) are cached. Each call makes a new CupyLauncher.
    """
    driver, nvrtc = stand_ins()
    packages = str(Path(nvrtc._name).parents[2])
    patch.setenv("FEWBITS_CACHE", str(cache_folder))
    patch.syspath_prepend(packages)
    cubins.nvrtc.cache_clear()
    cubins.version.cache_clear()
    driver.stub_reset()
    nvrtc.stub_set_major(13)
    driver.stub_make_current(0)
    answers = Torch(driver)
    answers.install(patch)
    try:
        assert cubins.nvrtc()._name == nvrtc._name
        yield Stub(driver, nvrtc, answers, Device(cuda.CupyLauncher()))
    finally:
        driver.stub_make_current(-1)
        sys.path.remove(packages)
        cubins.nvrtc.cache_clear()
        cubins.version.cache_clear()
