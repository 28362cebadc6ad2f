"""Print the benchmark's results: a table with notes, and a line for each peer (an implementation to compare with)."""

from collections.abc import Iterable, Sequence
from statistics import median

import torch

from fewbits.common.tables import print_table
from fewbits.kernels.bench.measure import PATIENCE
from fewbits.kernels.bench.results import Bench, Measured

SMALL = 64 << 20  # if a tensor and its copy have fewer bytes together, they may stay in the caches
NOTES = """\
All columns except those with × are in %.
copy   time of out.copy_(x) / time of our kernel, both into memory that was written before, in turns A B A B: median
       and range over {runs} turns (fewer if they take more than {patience:g} s).
       encode, weights and noise have no public out=: their backend functions are timed, and torch is patched to give
       their results memory that was written before.
mem    the value of `copy` that memory traffic alone would allow. The traffic counts each element once per read and
       once per write. A scale of the whole tensor needs a second read (then mem is 67); a second result needs
       a second write. Cache lines that a store fetches, and second reads that hit a cache, are not considered. Noise
       generators only write; they are compared with a copy of as many elements.
arith  the value of `copy` if memory access took no time: the copy's time per element / our time per element on tensors
       that stay in the caches, the best of all turns (– if other programs interfered). It is not measured on a GPU.
limit  the lower of mem and arith; at: `copy` as a share of the limit (on a GPU: of mem).
new    time of x.clone() / time of our kernel when both return new tensors; freeing them is not timed.
temp   peak memory during a call, without x and the result, relative to the tensor's bytes.
×      how many times longer a peer takes than our kernel, both returning new tensors (generators: per value, into
       memory that was written before), in turns, median of 3. Peers compute only the mean error and use torch's
       random numbers."""
LEFT = ("case", "limit")
SHORT = {"torch eager": "×eager", "torch.compile": "×compile"}


def show(bench: Bench) -> None:
    """Print the report to stdout."""
    facts = bench.machine
    speed = median([m.copy_bytes_per_second for m in bench.measured]) / 1e9
    print(
        f"{facts['device']}, load {facts['load']} at the start; fewbits {facts['fewbits']}, backend {facts['backend']}"
    )
    print(f"torch {facts['torch']}, python {facts['python']}, compiler {facts['compiler']}")
    print(f"tensor {bench.rows}x{bench.cols} {bench.dtype}, N(0, 1); a copy reads and writes {speed:.1f} GB/s in total")
    if bench.device == "cpu" and 2 * bench.rows * bench.cols * getattr(torch, bench.dtype).itemsize < SMALL:
        print("the tensor is small: the copy may stay in the caches, so these figures do not apply to large tensors")
    if float(facts["load"]) > float(facts["cores"]) / 2:
        print("other programs were running: they distort all figures, above all for calls that use several threads")
    for noise in (False, True):
        if measured := [m for m in bench.measured if m.noise == noise]:
            print()
            cells = _cells if bench.device == "cpu" else _gpu_cells
            _show_table([(m, cells(m)) for m in measured], bench.peers)
    print()
    print("\n".join([NOTES.format(runs=bench.runs, patience=PATIENCE), *_peer_lines(bench), *bench.notes]))


def _show_table(rows: Sequence[tuple[Measured, dict[str, str]]], peers: Iterable[str]) -> None:
    shown = [name for name in peers if any(name in m.peers for m, _ in rows)]
    columns = [*rows[0][1], *(SHORT.get(name, f"×{name}") for name in shown)]
    cells = [[*own.values(), *(_times(m, name) for name in shown)] for m, own in rows]
    print_table(columns, cells, right=[name for name in columns if name not in LEFT])


def _cells(m: Measured) -> dict[str, str]:
    cells = {
        "case": m.case,
        "copy": _percent(m.share.median),
        "range": f"{_percent(m.share.low)}–{_percent(m.share.high)}",
        "mem": _percent(m.memory),
        "arith": _percent(m.arithmetic),
        "limit": {"memory": "memory", "arithmetic": "arith", None: "?"}[m.limit],
        "at": _percent(m.reached),
        "new": _percent(m.allocating.median),
        "temp": _percent(m.temporary),
    }
    return cells | ({"ns each": f"{1e9 * m.seconds_per_element:.3f}"} if m.noise else {})


def _gpu_cells(m: Measured) -> dict[str, str]:
    cells = _cells(m)
    time = {"case": m.case, "µs": f"{1e6 * median(m.seconds['into']):.1f}"}
    return time | {name: cells[name] for name in ("copy", "range", "mem")} | {"at": _percent(m.share.median / m.memory)}


def _peer_lines(bench: Bench) -> list[str]:
    """Return a line for each peer: version, temporary memory, and the number of cases timed on a part of the rows."""
    lines = []
    for name, version in bench.peers.items():
        compared = [m.peers[name] for m in bench.measured if name in m.peers]
        if not compared:
            continue
        line = f"{name} {version}"
        temporary = [c.temporary for c in compared if c.temporary is not None]
        if temporary:
            line += f": temporary memory {_percent(min(temporary))}–{_percent(max(temporary))} %"
        fewer = [c.rows for c in compared if c.rows < bench.rows]
        if fewer:
            rows = " or ".join(map(str, sorted(set(fewer))))
            line += f"; {len(fewer)} of {len(compared)} cases timed on the first {rows} rows only (slow)"
        lines.append(line)
    return lines


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}"


def _times(m: Measured, peer: str) -> str:
    if peer not in m.peers:
        return ""
    ratio = m.peers[peer].longer.median
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
