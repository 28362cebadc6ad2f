"""Implement the common part of the compiled backends: allocate the results of a call, and describe its work as jobs.

A job is the work for one quantizer. The subclasses in cpu.py and gpu/device.py compute the jobs.
"""

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbits.kernels.backends import reference
from fewbits.kernels.backends.protocol import ABSENT, COUNTS, OperandOf, Part, Stored
from fewbits.kernels.packing import allocate
from fewbits.kernels.quantizer import Quantizer, parts_of
from fewbits.kernels.reference.noise import Noise
from fewbits.kernels.scalings import Select


class DecideCall(ctypes.Structure):
    """The arguments of the C++ and CUDA functions that compute Backend.decide.

    The fields are those of the struct DecideCall in csrc/decisions.h, whose comments explain them.
    """

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("counts", "other", "largest", "smallest", "decided", "choice")],
        ("limit", ctypes.c_double),
        ("blocks", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in ("index", "last")],
    ]


@dataclass
class Job:
    """The work of a call for one quantizer: the arguments, and the tensors that receive the results.

    ABSENT is the value of a result that the caller did not request. `partition` and `skip` are as in Backend.quantize.
    If `counted`, the backend also sets `counts` and `amax`, to zeros to which it adds the statistics.
    """

    q: Quantizer
    axis: int
    seed: int
    out: Tensor = ABSENT
    counted: bool = False
    counts: Tensor = ABSENT
    amax: Tensor = ABSENT
    partition: Part | None = None
    skip: Tensor = ABSENT
    stored: Stored | None = None  # if set: receives codes, scales and group scales, which are computed instead of `out`
    replayed: int = (
        0  # what a captured call reads from memory: its seed (1), the signs of its transform (2), or both (3)
    )
    operand: bool = False  # True: `stored` is laid out as an operand (`packing.operand_layout`)
    inverse: bool = False  # True: apply the inverse of the Hadamard transform

    def set_statistics(self, x: Tensor) -> None:
        """Set `counts` and `amax` to zeros if statistics are wanted."""
        if self.counted and self.partition:
            grid = parts_of(x.shape, self.partition)
            self.counts = torch.zeros(*grid, COUNTS, dtype=torch.int64, device=x.device)
            self.amax = torch.zeros(grid, device=x.device)


class Compiled(ABC):
    """The base class of the compiled backends. The methods without an underscore are those of protocol.py."""

    def quantize(
        self,
        x: Tensor,
        q: Quantizer,
        axis: int,
        seed: int,
        *,
        out: Tensor | None = None,
        want_values: bool = True,
        want_stats: bool = False,
        partition: Part | None = None,
        skip: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        part = partition or (max(x.shape[0], 1), max(x.shape[1], 1))
        job = Job(q, axis, seed, partition=part, counted=want_stats)
        job.skip = ABSENT if skip is None else skip
        if out is not None or want_values:
            job.out = torch.empty_like(x) if out is None else out
        self._run(x, job)
        return job.out, job.counts, job.amax

    def quantize_both(
        self,
        x: Tensor,
        row: Quantizer,
        column: Quantizer,
        row_seed: int,
        column_seed: int,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        along, down = (torch.empty_like(x), torch.empty_like(x)) if out is None else out
        self._run(x, Job(row, -1, row_seed, along), Job(column, 0, column_seed, down))
        return along, down

    def encode(self, x: Tensor, q: Quantizer, axis: int, seed: int) -> Stored:
        stored = allocate(q, axis, x)
        self._run(x, Job(q, axis, seed, stored=stored))
        return stored

    def encode_operands(self, x: Tensor, *of: OperandOf) -> tuple[Stored, ...]:
        jobs = [Job(*each, stored=allocate(*each[:2], x, operand=True), operand=True) for each in of]
        self._run(x, *jobs)
        return tuple(job.stored for job in jobs if job.stored)

    def decode(
        self,
        codes: Tensor,
        scales: Tensor,
        groups: Tensor,
        q: Quantizer,
        axis: int,
        cols: int,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty((codes.shape[0], cols), dtype=dtype, device=codes.device) if out is None else out
        if out.numel():
            self._decode((codes, scales, groups), q, axis, out)
        return out

    def extent(self, x: Tensor, partition: Part) -> tuple[Tensor, Tensor]:
        grid = parts_of(x.shape, partition)
        amax, amin = torch.zeros(grid, device=x.device), torch.full(grid, float("inf"), device=x.device)
        if x.numel():
            self._extent(x, partition, amax, amin)
        return amax, amin

    def decide(
        self,
        index: int,
        last: int,
        counts: Tensor,
        choice: Tensor,
        decided: Tensor,
        *,
        limit: float = 0.0,
        other: Tensor = ABSENT,
        extent: tuple[Tensor, Tensor] = (ABSENT, ABSENT),
    ) -> bool:
        if not choice.numel():
            return False
        largest, smallest = extent
        call = DecideCall(
            *(counts.data_ptr(), other.data_ptr(), largest.data_ptr(), smallest.data_ptr()),
            *(decided.data_ptr(), choice.data_ptr(), limit, choice.numel(), index, last),
        )
        return self._decide(call, counts.device)

    observe = staticmethod(reference.observe)

    def gaussian_noise(self, count: int, seed: int, device: torch.device) -> Tensor:
        words = torch.empty((count + 7) // 8, dtype=torch.int32, device=device)
        self._draw("gaussian", words, seed)
        return words

    def uniform_noise(self, count: int, seed: int, device: torch.device) -> Tensor:
        noise = torch.empty(count, dtype=torch.bfloat16, device=device)
        self._draw("uniform", noise, seed)
        return noise

    @abstractmethod
    def _run(self, x: Tensor, *jobs: Job) -> None:
        """Compute one or two jobs (one per quantizer) in one call, so that two jobs share the reads of x.

        x may be empty.
        """

    @abstractmethod
    def compare(self, source: Tensor, mine: Tensor, other: Tensor, partition: Part, by: Select) -> Tensor: ...

    @abstractmethod
    def _decode(self, stored: Stored, q: Quantizer, axis: int, out: Tensor) -> None: ...

    @abstractmethod
    def _extent(self, x: Tensor, partition: Part, amax: Tensor, amin: Tensor) -> None: ...

    @abstractmethod
    def _decide(self, call: DecideCall, device: torch.device) -> bool:
        """Choose a mixture's entry for the decision blocks that pass its test, as `Backend.decide` specifies.

        Return False if all blocks have an entry afterwards; True if not, or if the backend cannot know this.
        """

    @abstractmethod
    def _draw(self, noise: Noise, out: Tensor, seed: int) -> None: ...


def pointer(t: Tensor) -> int | None:
    """Return a tensor's address, or None for ABSENT, the tensor that stands for an unused argument or result."""
    return None if t is ABSENT else t.data_ptr()
