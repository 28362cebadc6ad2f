"""Choose the backend for a device: `reference` (plain torch, on any device), `cpu` (compiled C++) or `cuda`.

The environment variable FEWBITS_BACKEND forces one of them. If the backend of a device does not work, the reference is
used, and one warning says why.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from fewbits.kernels.backends import build, reference
from fewbits.kernels.backends.protocol import Backend
from fewbits.kernels.quantizer import Quantizer

NAMES = ("reference", "cpu", "cuda")


_replacement: Backend | None = None


def backend_for(device_type: str, *quantizers: Quantizer) -> Backend:
    """Return the backend that computes these quantizers on this device: the reference if one is affine."""
    if any(q.traits.kind == "affine" for q in quantizers):
        return reference
    if _replacement is not None:
        return _replacement
    return _choose(os.environ.get("FEWBITS_BACKEND") or None, device_type)


@contextmanager
def replaced_by(backend: Backend) -> Iterator[None]:
    """Use this backend for all devices and threads while the `with` block runs."""
    global _replacement
    before, _replacement = _replacement, backend
    try:
        yield
    finally:
        _replacement = before


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
            raise ValueError(
                f"FEWBITS_BACKEND=cpu, but the tensor is on {device_type}: move the tensor, or unset the variable"
            )
        _warn(f"fewbits has no kernels for {device_type}: it uses the reference backend, many times slower")
        return reference
    if forced is None and not build.available():
        _warn(f"{build.no_compiler()}; until then fewbits uses the reference backend, which is many times slower")
        return reference
    return _cpu_backend(forced)


def _cuda_backend(forced: str | None, device_type: str) -> Backend:
    from fewbits.kernels.backends.gpu import cuda

    complaint = cuda.complaint()
    if forced and complaint:
        raise ValueError(f"FEWBITS_BACKEND=cuda: {complaint}")
    if device_type != "cuda":
        raise ValueError(
            f"FEWBITS_BACKEND=cuda, but the tensor is on {device_type}: move the tensor, or unset the variable"
        )
    if complaint:
        _warn(
            "the CUDA kernels of fewbits do not work here, so it uses the reference backend, many times slower: "
            f"{complaint}"
        )
        return reference
    return cuda.BACKEND


def _cpu_backend(forced: str | None) -> Backend:
    from fewbits.kernels.backends import cpu

    try:
        cpu.library()
    except (build.BuildError, OSError) as error:
        if forced == "cpu":
            raise ValueError(f"FEWBITS_BACKEND=cpu: {error}") from error
        _warn(
            f"the CPU kernels of fewbits do not work here, so it uses the reference backend, many times slower: {error}"
        )
        return reference
    return cpu.BACKEND


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
