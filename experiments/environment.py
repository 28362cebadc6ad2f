"""Describe the environment that computes a trial, and compare the environments of runs. No id contains it.

Two environments give the same bits, and are compared, if they have the same values of COMPARED_KEYS: kind of processor
or GPU (such as `amd-avx2`), kernel backend, version of torch, and environment variables that change the order of sums.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fewbits.common.wording import redacted
from fewbits.kernels.backends import build
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.backends.processor import instruction_set, processor_name, processor_vendor

COMPARED_KEYS = ("kind", "backend", "torch", "limits")  # keys of an environment
# Environment variables that change the order of sums on the same kind of processor. ONEDNN_MAX_CPU_ISA and
# ATEN_CPU_CAPABILITY are not listed: they change the instruction set, which the environment's "kind" contains.
_LIMITS = ("FEWBITS_CPU_ARCH", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
UNKNOWN = "an unknown kind"

Environment = Mapping[str, str | None]
# The environments that computed a run's steps, in order; each is the tuple of its values of COMPARED_KEYS. Empty: none
# is known, because the run has not started, is of an old version of fewbits, or has a damaged provenance.json.
Computed = tuple[tuple[str | None, ...], ...]


def environment(device: torch.device) -> dict[str, str | None]:
    """Return facts about the environment in which this process computes on the device; None for unknown facts."""
    facts: dict[str, str | None] = {
        "device": device.type,
        "kind": None,
        "instruction_set": None,
        "backend": backend_for(device.type).name,
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
        reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        facts |= {"kind": name.strip().lower().replace(" ", "-"), "instruction_set": f"sm{major}{minor}", "gpu": name}
        facts |= {"sums": "reduced" if reduced else "fp32", "cupy": _cupy_version()}
    else:
        limits = " ".join(f"{name}={os.environ[name]}" for name in _LIMITS if os.environ.get(name))
        facts |= {"kind": processor_kind(), "instruction_set": instruction_set(), "limits": limits or None}
        facts |= {"compiler": _compiler_version() if facts["backend"] == "cpu" else None}
    return facts


def processor_kind() -> str:
    """Return the kind of this machine's processor, for example `amd-avx2`."""
    return f"{processor_vendor()}-{instruction_set()}"


def process_facts() -> dict[str, Any]:
    """Return the version of the code, the machine and the command line of this process, for provenance.json."""
    return {
        "git": commit(),
        "git_dirty": bool(_git("status", "--porcelain")),  # files differ from the commit
        "machine": platform.machine(),  # such as x86_64
        "host": platform.node(),
        "command": [redacted(argument) for argument in (Path(sys.argv[0]).name, *sys.argv[1:])],
    }


def segment(step: int, device: torch.device) -> dict[str, Any]:
    """Describe, for provenance.json, the segment of a trial's steps that this process computes, from `step` on."""
    return {
        "step": step,
        "environment": environment(device),
        "host": platform.node(),
        "time": round(time.time()),
        "git": commit(),
    }


def environments(provenance: Mapping[str, Any]) -> list[Environment]:
    """Return the environment of each segment in provenance.json, without those that a later process computed again."""
    segments: list[Mapping[str, Any]] = []
    for part in provenance.get("segments", ()):
        segments = [*(before for before in segments if before["step"] < part["step"]), part]
    return [part["environment"] for part in segments]


def computed(environments: Sequence[Environment]) -> Computed:
    """Return the values of COMPARED_KEYS of these environments, each of them once."""
    return tuple(dict.fromkeys(tuple(one.get(key) for key in COMPARED_KEYS) for one in environments))


def alike(one: Computed, other: Computed) -> bool:
    """Tell whether two runs can be compared: one environment computed all their steps, or none is known."""
    return one == other and len(one) <= 1


def kinds_of(one: Computed) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(kind) for kind, *_ in one))


def describe_kinds(one: Computed, beside: Collection[Computed] = ()) -> str:
    """Return a text that names the kinds of machine that computed a run, for example `amd-avx2 (torch 2.11.0)`.

    The brackets contain the values of COMPARED_KEYS that are not equal in all environments of `one` and `beside`.
    """
    parts = [part for run in (one, *beside) for part in run]
    differing = {key for at, key in enumerate(COMPARED_KEYS) if len({part[at] for part in parts}) > 1} - {"kind"}
    texts = []
    for part in one:
        more = ", ".join(f"{key} {value}" for key, value in zip(COMPARED_KEYS, part, strict=True) if key in differing)
        texts.append(f"{part[0]} ({more})" if more else f"{part[0]}")
    return ", then ".join(texts) or UNKNOWN


def commit() -> str | None:
    """Return the git commit of this code, or None outside a git repository."""
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    return _output("git", "-C", str(Path(__file__).resolve().parent), *arguments)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def _compiler_version() -> str | None:
    compiler = build.compiler()
    answer = _output(*compiler, "--version") if compiler else None
    return answer.partition("\n")[0] if answer else None


def _cupy_version() -> str | None:
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None
