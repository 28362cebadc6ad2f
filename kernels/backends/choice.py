"""Choose the backend by device and availability: `reference` (torch, anywhere), `cpu` (compiled) or `cuda`.

FEWBITS_BACKEND forces one. A fallback to the reference is announced once.
"""

import os
import warnings
from functools import cache

from fewbits.kernels.backends import build, reference
from fewbits.kernels.backends.protocol import Backend

NAMES = ("reference", "cpu", "cuda")


def backend_for(device_type: str) -> Backend:
    return _choose(os.environ.get("FEWBITS_BACKEND") or None, device_type)


@cache
def _choose(forced: str | None, device_type: str) -> Backend:
    if forced is not None and forced not in NAMES:
        raise ValueError(f"FEWBITS_BACKEND={forced} is unknown: valid values are {', '.join(NAMES)}")
    if forced == "reference":
        return reference
    if forced == "cuda" or (forced is None and device_type == "cuda"):
        return _cuda_backend(forced, device_type)
    if device_type != "cpu":
        if forced == "cpu":
            raise RuntimeError(
                f"FEWBITS_BACKEND=cpu, but the tensor is on {device_type}: move it, or unset the variable"
            )
        _warn(f"fewbits has no kernels for {device_type}: the reference backend is used, many times slower")
        return reference
    if forced is None and build.compiler() is None and not build.library_path().exists():
        _warn(f"{build.no_compiler()}; until then the reference backend is used, many times slower")
        return reference
    return _cpu_backend(forced)


def _cuda_backend(forced: str | None, device_type: str) -> Backend:
    from fewbits.kernels.backends import cuda

    complaint = cuda.complaint()
    if forced and complaint:
        raise RuntimeError(f"FEWBITS_BACKEND=cuda: {complaint}")
    if device_type != "cuda":
        raise RuntimeError(f"FEWBITS_BACKEND=cuda, but the tensor is on {device_type}: move it, or unset the variable")
    if complaint:
        _warn(
            f"the fewbits CUDA kernels do not work here; the reference backend is used, many times slower: {complaint}"
        )
        return reference
    return cuda.BACKEND


def _cpu_backend(forced: str | None) -> Backend:
    from fewbits.kernels.backends import cpu

    try:
        cpu.library()
    except (build.BuildError, OSError) as error:
        if forced == "cpu":
            raise
        _warn(f"the fewbits CPU kernels do not work here; the reference backend is used, many times slower: {error}")
        return reference
    return cpu.BACKEND


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
