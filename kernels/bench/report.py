"""Hold the benchmark's results and format them: a table with notes on what is counted, and JSON with every time."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal

import torch

from fewbits import __version__
from fewbits.kernels.backends import build
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.bench.measure import PATIENCE, Ratio
from fewbits.kernels.bench.peers import GENERATORS, PEERS

SMALL = 64 << 20  # bytes of a tensor and its copy that may fit in large caches


@dataclass(frozen=True)
class Compared:
    """The comparison of a peer with our kernel, on the tensor's first `rows`."""

    longer: Ratio
    rows: int
    temporary: float | None
    seconds: dict[str, list[float]]


@dataclass(frozen=True)
class Measured:
    """The result of a case; shares are relative to the copy's speed, `temporary` to the tensor's bytes."""

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
    in_cache_elements: int
    peers: dict[str, Compared] = field(default_factory=dict)

    @property
    def limit(self) -> Literal["memory", "arithmetic"] | None:
        if self.arithmetic is None:
            return None
        return "memory" if self.memory < self.arithmetic else "arithmetic"

    @property
    def reached(self) -> float | None:
        """The share of the limit that is reached."""
        return None if self.arithmetic is None else self.share.median / min(self.memory, self.arithmetic)


@dataclass
class Bench:
    machine: dict[str, str | int | float]
    dtype: str
    rows: int
    cols: int
    runs: int
    measured: list[Measured] = field(default_factory=list)
    peers: dict[str, str] = field(default_factory=dict)  # name -> version
    notes: list[str] = field(default_factory=list)


def machine() -> dict[str, str | int | float]:
    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    compiler = build.compiler()
    version = ""
    if compiler:
        answer = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
        version = answer.stdout.partition("\n")[0]
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "compiler": version or "none",
        "backend": backend_for("cpu").name,
        "fewbits": __version__,
    }


# ------------------------------------------------------------------------------------------------ JSON


def as_json(bench: Bench) -> str:
    answer = asdict(bench)
    for measured, entry in zip(bench.measured, answer["measured"], strict=True):
        entry |= {"limit": measured.limit, "reached": measured.reached}
    return json.dumps(answer, indent=1)


# ------------------------------------------------------------------------------------------------ text

NOTES = """\
copy   out.copy_(x) time / ours, both into memory that was written before, in turns A B A B: median and range over
       {runs} turns (fewer if they take more than {patience:g} s).
       Statistics, both axes, mix, weights and noise have no public out=: they are timed at the backend, and
       torch is patched to give their results memory that was written before.
mem    share that memory traffic alone allows. Counted: each element once per read and per write; a scale of the whole
       tensor is a second read (67), a second result a second write. Not counted: lines that a store fetches, and the
       part of a second read that hits a cache. Generators only write; their copy has as many elements.
arith  share if memory were free: the copy's time per element / ours on tensors that stay in the caches, best of all
       (– if other programs interfered).
limit  the lower of the two; at: the share of it that is reached, %.
new    x.clone() time / ours when both return new tensors; freeing them is not timed.
temp   peak memory during a call beyond x and what it returns, % of the tensor's bytes.
×      how many times longer a peer takes than ours, both returning new tensors (generators: per value, into memory that
       was written before), in turns, median of 3. Peers compute only the mean error, and use torch's random numbers."""

LEFT = ("case", "copy", "range", "mem", "arith", "limit", "at", "new", "temp")
SHORT = {"torch eager": "×eager", "torch.compile": "×compile"}


def as_text(bench: Bench) -> str:
    facts = bench.machine
    speed = median([m.copy_bytes_per_second for m in bench.measured]) / 1e9
    lines = [
        f"{facts['cpu']}, {facts['threads']} threads on {facts['cores']} cores, load {facts['load']} at the start; "
        f"fewbits {facts['fewbits']}, backend {facts['backend']}",
        f"torch {facts['torch']}, python {facts['python']}, compiler {facts['compiler']}",
        f"tensor {bench.rows}x{bench.cols} {bench.dtype}, N(0, 1); its copy runs at {speed:.1f} GB/s, read and written",
    ]
    nbytes = bench.rows * bench.cols * getattr(torch, bench.dtype).itemsize
    if 2 * nbytes < SMALL:
        lines.append("small tensor: the copy may run in the caches, so these shares do not apply to large tensors")
    if float(facts["load"]) > float(facts["cores"]) / 2:
        lines.append(
            "other programs were running: they distort all figures, most of all where threads wait for each other"
        )
    for noise, peers in ((False, PEERS), (True, GENERATORS)):
        matching = [m for m in bench.measured if m.noise == noise]
        shown = [
            peer.name for peer in peers if peer.name in bench.peers and any(peer.name in m.peers for m in matching)
        ]
        if matching:
            header = (*LEFT, *(SHORT.get(name, f"×{name}") for name in shown), *(["ns each"] if noise else []))
            lines += ["", *_table([header, *(_row(m, shown) for m in matching)])]
    lines += ["", "All but × in %.", NOTES.format(runs=bench.runs, patience=PATIENCE)]
    return "\n".join([*lines, *(_peer_lines(bench)), *bench.notes])


def _row(m: Measured, peers: Sequence[str]) -> tuple[str, ...]:
    cells = (
        *(m.case, _percent(m.share.median), f"{_percent(m.share.low)}–{_percent(m.share.high)}"),
        *(_percent(m.memory), _percent(m.arithmetic), {"arithmetic": "arith", None: "?"}.get(m.limit, m.limit or "")),
        *(_percent(m.reached), _percent(m.allocating.median), _percent(m.temporary)),
        *(_times(m.peers[name].longer.median) if name in m.peers else "" for name in peers),
    )
    return (*cells, f"{1e9 * m.seconds_per_element:.3f}") if m.noise else cells


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(w) if i in (0, 5) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _peer_lines(bench: Bench) -> list[str]:
    """Return for each peer its version, its temporary memory, and the cases in which it got fewer rows."""
    lines = []
    for name, version in bench.peers.items():
        compared = {m.case: m.peers[name] for m in bench.measured if name in m.peers}
        if not compared:
            continue
        line = f"{name} {version}"
        temporary = [c.temporary for c in compared.values() if c.temporary is not None]
        if temporary:
            line += f": temporary memory {_percent(min(temporary))}–{_percent(max(temporary))} %"
        fewer = sorted({c.rows for c in compared.values() if c.rows < bench.rows})
        if fewer:
            count = sum(c.rows < bench.rows for c in compared.values())
            line += f"; {count} of {len(compared)} cases on the first {' or '.join(map(str, fewer))} rows (slow)"
        lines.append(line)
    return lines


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
