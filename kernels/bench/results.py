"""Define the benchmark's results, which contain the time of every single call, and describe the machine."""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch

from fewbits import __version__
from fewbits.kernels.backends import build
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.backends.processor import processor_name
from fewbits.kernels.bench.measure import Ratio


@dataclass(frozen=True)
class Compared:
    """The comparison of a peer with our kernel, on the first `rows` rows of the tensor."""

    longer: Ratio  # the peer's time / our time
    rows: int
    temporary: float | None  # the peer's peak memory, relative to the tensor's bytes
    seconds: dict[str, list[float]]  # of each turn, under "theirs" and "ours"


@dataclass(frozen=True)
class Measured:
    """The result of a case.

    `share`, `memory`, `arithmetic` and `allocating` are speeds relative to the copy (or clone), as report.py explains;
    `temporary` is relative to the tensor's bytes.
    """

    case: str
    noise: bool
    share: Ratio
    memory: float
    arithmetic: float | None
    allocating: Ratio
    temporary: float | None
    copy_bytes_per_second: float
    seconds_per_element: float
    seconds: dict[str, list[float]]
    peers: dict[str, Compared] = field(default_factory=dict)

    @property
    def limit(self) -> Literal["memory", "arithmetic"] | None:
        if self.arithmetic is None:
            return None
        return "memory" if self.memory < self.arithmetic else "arithmetic"

    @property
    def reached(self) -> float | None:
        """The speed of our kernel as a share of the limit, or None if the limit is unknown."""
        return None if self.arithmetic is None else self.share.median / min(self.memory, self.arithmetic)


@dataclass
class Bench:
    machine: dict[str, str | int | float]
    device: str
    dtype: str
    rows: int
    cols: int
    runs: int
    measured: list[Measured] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)  # name -> version
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> str:
        answer = asdict(self)
        for measured, entry in zip(self.measured, answer["measured"], strict=True):
            entry |= {"limit": measured.limit, "reached": measured.reached}
        return json.dumps(answer, indent=1)


def machine(device: str) -> dict[str, str | int | float]:
    """Return facts about this machine, its present load and its software."""
    compiler, version = build.compiler(), "none"
    if compiler:
        answer = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
        version = answer.stdout.partition("\n")[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    on_cpu = f"{processor_name()}, {torch.get_num_threads()} of {cores} cores"
    return {
        "processor": processor_name(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else on_cpu,
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": version,
        "backend": backend_for(device).name,
        "fewbits": __version__,
    }
