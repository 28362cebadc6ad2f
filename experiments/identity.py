"""What makes a trial the same trial: its id, and where it came from.

The id is a hash of the resolved config, the data's fingerprint, the sources of the rooms that compute a trial, torch's
version and the kernels' backend. Names and descriptions are not part of it, nor is anything of the runtime: two studies
that ask for the same computation share one trial. The git commit is provenance alone.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fewbits.experiments.trial import Trial
from fewbits.kernels.backends import backend_for

ROOMS = ("kernels", "models", "experiments")
SOURCES = {".py", ".h", ".cpp", ".cu", ".cuh"}
_HERE = Path(__file__).parent


def trial_id(trial: Trial, data_fingerprint: str, device: str, parent: str | None) -> str:
    """parent: the id of the trial that it branches from, with the step."""
    return _digest(identity(trial, data_fingerprint, device, parent))


def identity(trial: Trial, data_fingerprint: str, device: str, parent: str | None) -> dict[str, Any]:
    """The parts that the id is a hash of, to be compared where two differ."""
    config = trial.to_dict()
    del config["model"]["name"], config["recipe"]["name"], config["recipe"]["about"], config["data"]
    config["branch"] = parent
    return {
        "config": config,
        "data": data_fingerprint,
        "sources": {room: sources_digest(room) for room in ROOMS},
        "torch": str(torch.__version__),
        "backend": f"{device}:{backend_name(device)}",
    }


@cache
def sources_digest(room: str) -> str:
    folder = (_HERE.parent / room).resolve()
    files = sorted(f for f in folder.rglob("*") if f.suffix in SOURCES)
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def backend_name(device: str) -> str:
    return backend_for(device).__name__.rpartition(".")[2]


def provenance(identity: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Where a run's numbers come from, beside what its id is made of."""
    return {
        "identity": dict(identity),
        "git": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "host": platform.node(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "process": os.getpid(),
        **extra,
    }


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(("git", *words), cwd=_HERE.resolve(), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
