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
    """The comparison of a peer (another implementation) with our kernel, on the first `rows` rows of the tensor."""

    longer: Ratio  # the peer's time / our time
    rows: int
    temporary: float | None  # the peer's peak memory without x and the result, relative to the bytes of these rows
    seconds: dict[str, list[float]]  # "theirs", "ours" -> the seconds of each turn


@dataclass(frozen=True)
class Measured:
    """The result of one of the benchmark's cases, that is, of one call of our kernels that is timed.

    `share` is the kernel's speed relative to the copy (1: as fast as the copy); `memory` and `arithmetic` are upper
    limits of `share`. `allocating` is the speed, relative to x.clone(), of the call that allocates its results.
    report.py prints these four values in the columns `copy`, `mem`, `arith` and `new`.
    """

    case: str  # the name of the case
    noise: bool  # True: the case only generates noise
    share: Ratio  # the time of out.copy_(x) / the time of our kernel
    memory: float  # the value of `share` that memory traffic alone would allow
    arithmetic: float | None  # the value of `share` that arithmetic alone would allow; None: not measured
    allocating: Ratio  # the time of x.clone() / the time of our kernel when it allocates its results
    temporary: float | None  # the peak memory without x and the result, relative to the tensor's bytes
    copy_bytes_per_second: float  # bytes read and written
    seconds_per_element: float
    seconds: dict[str, list[float]]  # name of a timer ("copy", "into", "clone", "fresh" …) -> the seconds of each turn
    peers: dict[str, Compared] = field(default_factory=dict)  # name of the peer -> comparison

    @property
    def limit(self) -> Literal["memory", "arithmetic"] | None:
        if self.arithmetic is None:
            return None
        return "memory" if self.memory < self.arithmetic else "arithmetic"

    @property
    def reached(self) -> float | None:
        """The speed of our kernel as a share of the limit, the smaller of `memory` and `arithmetic`.

        None if the limit is unknown, because `arithmetic` was not measured.
        """
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
    """Return facts about this machine, its load average and its software, as a dictionary for the JSON file."""
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
