"""Describe the environment of a trial: processor, GPU, torch, compiler. The environment is not in the trial's id.

Two environments give the same bits if they have the same values of COMPARED_KEYS: kind of processor or GPU, kernel
backend, version of torch, and environment variables that change the order of sums, such as MKL_CBWR. Other environments
may round sums differently, so compare trials only if these values are the same.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata

import torch

from fewbits.kernels.backends import build
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.backends.processor import instruction_set, processor_name, processor_vendor

COMPARED_KEYS = ("kind", "backend", "torch", "limits")  # keys of an environment
# Environment variables that change the order of sums on the same kind of processor. ONEDNN_MAX_CPU_ISA and
# ATEN_CPU_CAPABILITY are not listed: they change the instruction set, which the environment's "kind" contains.
_LIMITS = ("FEWBITS_CPU_ARCH", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")

Environment = Mapping[str, str | None]


def environment(device: torch.device) -> dict[str, str | None]:
    """Return facts about the environment in which this process computes on the device; None for unknown facts."""
    facts: dict[str, str | None] = {
        "device": device.type,
        "kind": None,
        "instruction_set": None,
        "backend": backend_name(device.type),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "processor": processor_name(),
        "gpu": None,
        "cupy": None,
        "compiler": None,
        "limits": None,
        "sums": None,  # how the GPU adds up BF16 products: fp32, or reduced if it may round partial sums
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        facts |= {"kind": gpu_kind(name), "instruction_set": f"sm{major}{minor}", "gpu": name}
        reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        facts |= {"sums": "reduced" if reduced else "fp32"}
        facts |= {"cupy": _package_version("cupy-cuda13x", "cupy-cuda12x", "cupy")}
    else:
        facts |= {"kind": processor_kind(), "instruction_set": instruction_set()}
        facts |= {"compiler": _compiler_version() if facts["backend"] == "cpu" else None, "limits": cpu_limits()}
    return facts


def processor_kind() -> str:
    """Return the kind of this machine's processor, for example `amd-avx2`."""
    return f"{processor_vendor()}-{instruction_set()}"


def cpu_limits() -> str | None:
    """Return the environment variables of `_LIMITS` that are set, as NAME=VALUE separated by spaces, or None.

    These variables, such as MKL_CBWR, change how sums are rounded on the same kind of CPU.
    """
    return " ".join(f"{name}={os.environ[name]}" for name in _LIMITS if os.environ.get(name)) or None


def gpu_kind(name: str) -> str:
    """Return the kind of a GPU, for example `nvidia-h100-80gb-hbm3`; `name` is its name according to the driver."""
    return name.strip().lower().replace(" ", "-")


def compared_values(environment: Environment) -> tuple[str | None, ...]:
    """Return an environment's values of COMPARED_KEYS: kind of machine, kernel backend, version of torch, limits.

    The limits are environment variables that change how sums are rounded (`cpu_limits`). Trials are comparable if these
    values of their environments are the same.
    """
    return tuple(environment.get(key) for key in COMPARED_KEYS)


def backend_name(device: str) -> str:
    """Return the name of the kernel backend (cpu, cuda or reference) that runs on a kind of device (cpu or cuda)."""
    return backend_for(device).name


@cache
def _compiler_version() -> str | None:
    command = build.compiler()
    if command is None:
        return None
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.partition("\n")[0] or None


def _package_version(*packages: str) -> str | None:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None
