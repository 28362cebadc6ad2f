"""Provide the CUDA backend: the functions of reference.py, computed by the kernels of csrc/, which CuPy launches.

Kernels run on torch's current stream of the tensor's device and on torch's memory. Calls neither copy data nor wait for
the device, so they can be captured in a CUDA graph (after a first call, which compiles and loads the kernels).
`complaint` says in one line why this backend does not work on this machine.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fewbits.kernels.backends.build import BuildError, cache_folder, open_lock
from fewbits.kernels.backends.gpu import cubins
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.tiles import STATIC_SHARED
from fewbits.kernels.backends.gpu.variants import STRIP, Kernel, Variant
from fewbits.kernels.backends.protocol import Backend

MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97  # the number of this device attribute in CUDA's driver
EMPTY = 'extern "C" __global__ void run() {}\n'
OLDEST = (8, 0)  # the lowest compute capability: the conversion to bf16 needs Ampere


def complaint() -> str | None:
    """Return one line that says what this backend lacks and how to install it, or None if the backend works."""
    if not torch.cuda.is_available():
        if not Path("/proc/driver/nvidia").exists():
            return "there is no NVIDIA GPU here, or its driver is not loaded (/proc/driver/nvidia does not exist)"
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
        import cupy  # noqa: F401, its import locates the libraries that cupy_backends needs
        from cupy_backends.cuda.api import driver

        installed, wanted = _driver_version(), driver.get_build_version()
    except Exception as error:  # a broken installation can raise any exception
        return f"CuPy does not work ({' '.join(str(error).split())}): pip install {package}"
    if installed // 1000 < wanted // 1000:
        has, needs = f"{installed // 1000}.{installed % 1000 // 10}", wanted // 1000
        return f"the driver is for CUDA {has}, CuPy for {needs}: update the driver, or pip install cupy-cuda{has[:2]}x"
    try:
        compiler = cubins.version()
        if compiler[0] > installed // 1000:
            return (
                f"the driver is for CUDA {installed // 1000}.{installed % 1000 // 10}, and cannot load what NVRTC "
                f"{compiler[0]}.{compiler[1]} compiles: update the driver, or {cubins.install(installed // 1000)}"
            )
        open_lock(cache_folder() / "cuda.lock").close()
    except BuildError as error:
        return str(error)
    if torch.cuda.is_current_stream_capturing() or (failure := _failure(torch.cuda.current_device())) is None:
        return None
    return f"{failure}: update the driver, or {cubins.install(installed // 1000)}"


def _failure(index: int) -> str | None:
    """Compile, load and launch an empty kernel on the device `index`; return what failed, or None."""
    try:
        architecture = cubins.target(torch.cuda.get_device_capability(index))
        with _current(_context(index)):
            module = _module(EMPTY, architecture)
            stream = torch._C._cuda_getCurrentRawStream(index)
            _driver().launchKernel(_driver().moduleGetFunction(module, "run"), 1, 1, 1, 32, 1, 1, 0, stream, 0, 0)
            torch.cuda.synchronize(index)
            _driver().moduleUnload(module)
    except Exception as error:  # of NVRTC, of CuPy, or of torch
        return f"an empty kernel does not run on {torch.cuda.get_device_name(index)} ({' '.join(str(error).split())})"
    return None


class CupyLauncher:
    """A launcher that loads each compiled kernel once per device, and launches it by CuPy's calls of the driver."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[Variant, int], Kernel] = {}
        self._modules: list[int] = []  # never unloaded: a CUDA graph may use their kernels
        self._lock = threading.Lock()

    def kernel(self, variant: Variant, device: torch.device) -> Kernel:
        index = _index(device)
        return self._kernels.get((variant, index)) or self._load(variant, index)

    def shared_memory(self, device: torch.device) -> int:
        return _shared_memory(_index(device))

    def _load(self, variant: Variant, index: int) -> Kernel:
        with self._lock:
            if (variant, index) not in self._kernels:
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        f"the kernel {variant.kernel} is not loaded, and no kernel can be loaded while a CUDA graph is "
                        "captured: call the function once before the capture, with the same shape and dtype"
                    )
                context = _context(index)
                with _current(context):
                    function = _driver().moduleGetFunction(self._load_module(variant, index), "run")
                    if any(spec.source == STRIP for spec in variant.specs):
                        most = _driver().CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                        _driver().funcSetAttribute(function, most, _shared_memory(index))
                self._kernels[variant, index] = _launching(function, variant.shape.threads, index, context)
            return self._kernels[variant, index]

    def _load_module(self, variant: Variant, index: int) -> int:
        """Load a kernel's machine code on the device `index`, and return the driver's handle of the loaded module."""
        module = _module(variant.source(), architecture_of(index))
        self._modules.append(module)
        return module


def _module(source: str, architecture: str) -> int:
    """Compile a source and load it in the current context; return the driver's handle of the loaded module.

    If the driver rejects the cached machine code, compile it again, once.
    """
    try:
        module: int = _driver().moduleLoadData(cubins.cubin(source, architecture))
    except _driver().CUDADriverError:
        cubins.discard(source, architecture)
        module = _driver().moduleLoadData(cubins.cubin(source, architecture))
    return module


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def architecture_of(index: int) -> str:
    """Return the architecture for which kernels of a device are compiled, such as sm_90."""
    return cubins.target(torch.cuda.get_device_capability(index))


def _launching(function: int, threads: int, index: int, context: int) -> Kernel:
    """Return the function that queues a loaded kernel on torch's current stream of the device `index`.

    The stream belongs to `context`, the context of the device, so `context` must be current during the launch. The
    returned function makes it current, launches the kernel, and makes the thread's earlier context current again. If
    the thread had no current context, which is so in a new thread of autograd, `context` stays current.

    function: the driver's handle of the kernel. threads: the number of threads of a CTA.
    """
    driver = _driver()
    launch, current, make_current = driver.launchKernel, driver.ctxGetCurrent, driver.ctxSetCurrent
    stream_of = torch._C._cuda_getCurrentRawStream

    def run(blocks: int, shared: int, arguments: int) -> None:
        before = current()
        if before == context:
            launch(function, blocks, 1, 1, threads, 1, 1, shared, stream_of(index), arguments, 0)
            return
        make_current(context)
        try:
            launch(function, blocks, 1, 1, threads, 1, 1, shared, stream_of(index), arguments, 0)
        finally:
            if before:
                make_current(before)

    return run


@contextmanager
def _current(context: int) -> Iterator[None]:
    """Make a context current in the `with` block, and afterwards the context that was current before, if any."""
    before = _driver().ctxGetCurrent()
    _driver().ctxSetCurrent(context)
    try:
        yield
    finally:
        if before:
            _driver().ctxSetCurrent(before)


@cache
def _context(index: int) -> int:
    """Return the primary context of a device, which torch uses too, and keep it alive."""
    library, device, context = _library(), ctypes.c_int(), ctypes.c_void_p()
    status = library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), index)
    status = status or library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if status or not context.value:
        raise RuntimeError(f"the CUDA driver cannot open GPU {index} (error {status}): check its state with nvidia-smi")
    return context.value


@cache
def _shared_memory(index: int) -> int:
    """Return the largest dynamic shared memory, in bytes, that a CTA can have on the device `index`.

    This is the device's limit of shared memory per CTA, minus STATIC_SHARED, the memory reserved for variables that
    kernels declare.
    """
    library, device, most = _library(), ctypes.c_int(), ctypes.c_int()
    status = library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), index)
    status = status or library.cuDeviceGetAttribute(ctypes.byref(most), MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)
    if status:
        raise RuntimeError(
            f"the CUDA driver does not report the size of GPU {index}'s shared memory (error {status}): check the "
            "GPU's state with nvidia-smi"
        )
    return most.value - STATIC_SHARED


def _driver_version() -> int:
    """Return the latest version of CUDA that the driver supports, such as 12040 for 12.4."""
    version = ctypes.c_int()
    _library().cuDriverGetVersion(ctypes.byref(version))
    return version.value


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _driver() -> Any:
    from cupy_backends.cuda.api import driver

    return driver


BACKEND: Backend = Device(CupyLauncher())
