"""Run the CUDA backend on real CuPy without a GPU, with stand-ins for NVIDIA's driver and for NVRTC.

The stand-ins (stub/) are libraries with the names and functions of the real ones. CuPy loads and launches kernels
through the driver's stand-in, which runs each launch on the SIMT emulator with the launch's arguments. All code of
fewbits runs unchanged. A CPU build of torch has no CUDA, so the class `Torch` replaces the few functions of torch.cuda
that fewbits calls.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fewbits.kernels import operators
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


class Graph(TorchDispatchMode):
    """Records the driver's launches and torch's operators inside a `with` block, and replays them in the same order.

    As while a CUDA graph is captured, no launch and no operator in place is executed. Other operators are executed
    once, which allocates their results; a replay overwrites these.
    """

    def __init__(self, stub: Stub) -> None:
        super().__init__()
        self.stub = stub
        self.nodes: list[Callable[[], object]] = []
        self.replays = 0
        self.kept: list[object] = []  # results, whose memory a graph keeps

    def __enter__(self) -> Self:
        self.stub.torch.capturing = True
        assert self.stub.driver.cuStreamBeginCapture(None, 0) == 0
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._end_launches()
        self.stub.torch.capturing = False

    def replay(self) -> None:
        self.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for node in self.nodes:
                node()

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Also record what runs below an operator of ours, where torch has suspended this mode."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _end_launches(self) -> None:
        handle = ctypes.c_void_p()
        assert self.stub.driver.cuStreamEndCapture(None, ctypes.byref(handle)) == 0
        self.nodes.append(lambda: self.stub.driver.cuGraphLaunch(handle, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (run := operators._DIRECT.get(func.overloadpacket)) is not None:  # an operator of ours
            before = self.stub.driver.stub_launch_count()
            with self.nested():
                result = run(*args, **kwargs)
            return result if self.stub.driver.stub_launch_count() > before else self._record(func, args, kwargs, result)
        with self.nested():  # an operator that torch defines by others, such as `to`, which may copy or not
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        if func.is_view or func._schema.name.split("::")[1].startswith(("empty", "new_empty")):
            result = func(*args, **kwargs)
            self.kept.append(result)
            return result
        self._end_launches()
        assert self.stub.driver.cuStreamBeginCapture(None, 0) == 0
        if func._schema.is_mutable:
            self.nodes.append(partial(func, *args, **kwargs))
            return kwargs.get("out", args[0]) if func._schema.returns else None
        return self._record(func, args, kwargs, func(*args, **kwargs))

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Record an operator that a replay computes again; it then overwrites `result`."""

        def again() -> None:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        self.nodes.append(again)
        return result


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

    def capture(self) -> Graph:
        return Graph(self)


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
