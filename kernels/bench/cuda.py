"""Implement `fewbits bench kernels --device cuda`: time our kernels, the device's copy and peers by CUDA events.

A turn calls one of them on each of several input sets, which together far exceed the L2 cache, between two events. The
device is kept busy before the first event, so that the host has queued everything when the timer starts. Ratios are
taken within a turn, and the table shows the median of the turns.

share    the bytes that a perfect kernel must move, per second, as a share of those that the copy moves per second.
         Counted: each element once per read and per write; a scale that spans more than stays on chip is a second read.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from fewbits.kernels.bench.cases import Case
from fewbits.kernels.bench.measure import Ratio
from fewbits.kernels.bench.peers import PEERS, Work, first_line, quiet

BEYOND_L2 = 4  # the input sets are at least this many times the L2 cache
BUSY_CYCLES = 40_000_000  # about 20 ms, during which the host queues a turn
PEER_TURNS = 3


@dataclass
class Measured:
    case: str
    microseconds: float
    share: Ratio
    longer: dict[str, float] = field(default_factory=dict)  # peer -> how many times longer it takes


@dataclass(frozen=True)
class Sets:
    """Inputs and output buffers, used in turn."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @staticmethod
    def of(rows: int, cols: int, dtype: torch.dtype) -> "Sets":
        size = rows * cols * dtype.itemsize
        cache: int = torch.cuda.get_device_properties(0).L2_cache_size
        count = max(2, -(-BEYOND_L2 * cache // size))
        generator = torch.Generator("cuda").manual_seed(0)
        inputs = tuple(torch.randn(rows, cols, generator=generator, device="cuda").to(dtype) for _ in range(count))
        return Sets(inputs, tuple(torch.zeros_like(x) for x in inputs))

    def seconds(self, call: Callable[[Tensor, Tensor], object]) -> float:
        """Return the seconds of one call, averaged over the sets."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(BUSY_CYCLES)
        start.record()
        for x, out in zip(self.inputs, self.outputs, strict=True):
            call(x, out)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3 / len(self.inputs)

    def turns(self, calls: Sequence[Callable[[Tensor, Tensor], object]], count: int) -> list[list[float]]:
        """Return the seconds of each call in each turn, after an untimed first turn."""
        for call in calls:
            self.seconds(call)
        return [list(times) for times in zip(*([self.seconds(c) for c in calls] for _ in range(count)), strict=True)]


def main(
    cases: Sequence[Case],
    rows: int,
    cols: int,
    dtype: torch.dtype,
    runs: int,
    *,
    peers: bool,
    json_file: Path | None,
) -> int:
    speeds: list[float] = []
    measured: list[Measured] = []
    notes: list[str] = []
    sets, current = Sets((), ()), None
    for case in cases:
        required = case.dtype or dtype
        if current != required:
            sets = Sets((), ())  # freed before the next are allocated
            sets, current = Sets.of(rows, cols, required), required
        copy, ours = sets.turns([lambda x, out: out.copy_(x), case.into], runs)
        x = sets.inputs[0]
        speeds += [2 * x.nbytes / t for t in copy]
        traffic = case.traffic(x.dtype.itemsize)
        result = Measured(case.name, median(ours) * 1e6, Ratio.of([traffic * t for t in copy], ours))
        if peers:
            _compare(case, sets, result, notes)
        measured.append(result)
    report: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tensor": f"{rows}x{cols} {str(dtype).removeprefix('torch.')}",
        "copy_bytes_per_second": median(speeds),
        "cases": [asdict(m) for m in measured],
        "notes": notes,
    }
    print(_text(report, measured, notes))
    if json_file:
        json_file.write_text(json.dumps(report, indent=1))
    return 0


def _compare(case: Case, sets: Sets, result: Measured, notes: list[str]) -> None:
    for peer in PEERS:
        if peer.name == "ml_dtypes" or peer.missing():
            continue
        try:
            with quiet():
                work = peer.work(case)
                if work is not None:
                    result.longer[peer.name] = _longer(work, case, sets)
        except Exception as error:  # a failure of another package is a result
            notes.append(f"{peer.name} failed on {case.name}: {first_line(error)}")


def _longer(work: Work, case: Case, sets: Sets) -> float:
    theirs, ours = sets.turns([lambda x, _: work(x), lambda x, _: case.fresh(x)], PEER_TURNS)
    return Ratio.of(theirs, ours).median


def _text(report: dict[str, object], measured: Sequence[Measured], notes: Sequence[str]) -> str:
    names = [peer.name for peer in PEERS if any(peer.name in m.longer for m in measured)]
    speed = float(str(report["copy_bytes_per_second"])) / 1e9
    lines = [
        f"{report['gpu']}; torch {report['torch']}, CUDA {report['cuda']}",
        f"tensor {report['tensor']}, N(0, 1); its copy runs at {speed:.0f} GB/s, read and written",
        "",
        "  ".join(
            [f"{'case':44}", f"{'µs':>7}", f"{'share %':>8}", f"{'range':>9}", *(f"{'×' + n:>14}" for n in names)]
        ),
    ]
    for m in measured:
        span = f"{100 * m.share.low:.0f}–{100 * m.share.high:.0f}"
        peers = (f"{m.longer[n]:14.2f}" if n in m.longer else " " * 14 for n in names)
        lines.append(
            "  ".join([f"{m.case:44}", f"{m.microseconds:7.1f}", f"{100 * m.share.median:8.0f}", f"{span:>9}", *peers])
        )
    lines += [
        "",
        "share  bytes that a perfect kernel must move per second, as a share of the copy's bytes per second",
        "×      how many times longer a peer takes than ours, both returning new tensors",
    ]
    return "\n".join([*lines, *notes])
