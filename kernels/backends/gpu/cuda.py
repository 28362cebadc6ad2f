"""Provide the CUDA backend: the functions of reference.py, computed by the kernels of csrc/, which CuPy launches.

Kernels run on torch's current stream of the tensor's device and on torch's memory. Calls neither copy data nor wait for
the device, so they can be captured in a CUDA graph (after a first call, which compiles and loads the kernels).
`complaint` says in one line why this backend does not work on this machine.
"""

import ctypes
import threading
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from fewbits.kernels.backends.build import BuildError, cache_folder, open_lock
from fewbits.kernels.backends.gpu import cubins
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.variants import Variant
from fewbits.kernels.backends.protocol import Backend

OLDEST = (8, 0)  # compute capability: bf16 conversion needs Ampere


def complaint() -> str | None:
    """Return one line that says what this backend lacks and how to install it, or None if the backend works."""
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__}"
        if torch.version.cuda is None:
            return f"{build} is built without CUDA: install a build with CUDA (see pytorch.org)"
        return f"{build} finds no CUDA device: install NVIDIA's driver for CUDA {torch.version.cuda} or newer"
    if torch.cuda.get_device_capability() < OLDEST:
        name = torch.cuda.get_device_name()
        return f"{name} is too old for the kernels: use a GPU of compute capability 8.0 or newer"
    major = (torch.version.cuda or "13").partition(".")[0]
    package = f"cupy-cuda{major}x"
    if find_spec("cupy") is None:
        return f"CuPy, which launches the kernels, is missing: pip install {package}"
    try:
        import cupy  # noqa: F401, locates the libraries that its parts need
        from cupy_backends.cuda.api import driver, runtime

        installed, wanted = runtime.driverGetVersion(), driver.get_build_version()
    except Exception as error:  # a broken installation can raise any exception
        return f"CuPy does not work ({' '.join(str(error).split())}): pip install {package}"
    if installed // 1000 < wanted // 1000:
        has, needs = f"{installed // 1000}.{installed % 1000 // 10}", wanted // 1000
        return f"the driver is for CUDA {has}, CuPy for {needs}: update the driver, or pip install cupy-cuda{has[:2]}x"
    try:
        cubins.nvrtc()
        open_lock(cache_folder() / "cuda.lock").close()
    except BuildError as error:
        return str(error)
    return None


class CupyLauncher:
    """A launcher that loads each cubin once per device and launches its kernel through CuPy's binding of the driver."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[Variant, int], int] = {}
        self._modules: list[int] = []  # never unloaded: a CUDA graph may use their kernels
        self._lock = threading.Lock()

    def launch(self, variant: Variant, blocks: int, call: ctypes.Structure, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index):
            # In a new thread, torch's guard does not make the CUDA context current.
            if not _driver().ctxGetCurrent():
                _runtime().setDevice(index)
            kernel = self._kernels.get((variant, index)) or self._load(variant, index)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(call))
            stream = torch.cuda.current_stream(index).cuda_stream
            grid, threads = (blocks, 1, 1), (variant.shape.threads, 1, 1)
            _driver().launchKernel(kernel, *grid, *threads, 0, stream, ctypes.addressof(arguments), 0)

    def _load(self, variant: Variant, index: int) -> int:
        with self._lock:
            if (variant, index) not in self._kernels:
                major, minor = torch.cuda.get_device_capability(index)
                # The suffix `a` also allows features that only this architecture has.
                architecture = f"sm_{major}{minor}{'a' if major >= 10 else ''}"
                code = cubins.cubin(variant.source(), architecture)
                module = _driver().moduleLoadData(code)
                self._modules.append(module)
                self._kernels[variant, index] = _driver().moduleGetFunction(module, "run")
            return self._kernels[variant, index]


@cache
def _driver() -> Any:
    from cupy_backends.cuda.api import driver

    return driver


@cache
def _runtime() -> Any:
    from cupy_backends.cuda.api import runtime

    return runtime


BACKEND: Backend = Device(CupyLauncher())
