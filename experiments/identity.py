"""What makes a trial the same trial: its id, and where it came from.

The id is a hash of all that decides a trial's bits: the resolved config, the data's fingerprint, the sources that
compute it, torch's version, the kernels' backend, and over how many processes and threads sums are spread.
Names and descriptions are not part of it, nor is anything else of the runtime: two studies that ask for the same
computation share one trial. The git commit is provenance alone.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fewbits.experiments.devices import World
from fewbits.experiments.sources import ROOMS, sources, sources_digest
from fewbits.experiments.trial import Trial
from fewbits.kernels.backends import backend_for

_HERE = Path(__file__).parent


def identity(trial: Trial, data_fingerprint: str, world: World, parent: str | None = None) -> dict[str, Any]:
    """The parts that the id is a hash of, to be compared where two differ.

    parent: the id of the trial that it branches from, with the step.
    """
    config = trial.to_dict()
    del config["model"]["name"], config["recipe"]["name"], config["recipe"]["about"], config["data"]
    del config["training"]["checkpoint_every"]  # computes nothing
    config["branch"] = parent
    device = world.device.type
    return {
        "config": config,
        "data": data_fingerprint,
        "sources": {room: sources_digest(room) for room in ROOMS},
        "torch": str(torch.__version__),
        "backend": f"{device}:{backend_name(device)}",
        "ranks": world.ranks,  # each draws noise of its own
        "threads": world.threads if device == "cpu" else None,  # torch spreads some sums over them
    }


def trial_id(identity: Mapping[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def backend_name(device: str) -> str:
    return backend_for(device).__name__.rpartition(".")[2]


def provenance(identity: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Where a run's numbers come from, beside what its id is made of."""
    return {
        "identity": dict(identity),
        "sources": sources(),  # file by file, to say which one has changed
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


def commit() -> str | None:
    """Return the git commit of this code, or None where git does not know it."""
    return _git("rev-parse", "HEAD")


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
