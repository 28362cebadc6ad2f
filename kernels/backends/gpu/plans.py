"""Prepare the kernel launches of a call, for reuse by calls that differ only in addresses, seeds and signs.

The signs are those of the quantizers' Hadamard transforms. A Plan contains the kernels of a call, the number of CTAs
(thread blocks), and the arguments without addresses, seeds and signs. Device (device.py) caches plans. So a repeated
call only copies the arguments, adds addresses, seeds and signs, and launches the kernels.
"""

import ctypes
import math
import struct
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fewbits.kernels.backends.compiled import Job
from fewbits.kernels.backends.constants import inf_code, nan_code
from fewbits.kernels.backends.gpu.calls import Call, Request, packed_at
from fewbits.kernels.backends.gpu.tiles import (
    COLUMNS,
    EDGE,
    MOST,
    Shape,
    block_on_chip,
    covers_columns,
    divides_into_strips,
    fitting_shape,
    parts_in,
    strip_shape,
    tile_count,
    tiles_kept,
    usual_shape,
)
from fewbits.kernels.backends.gpu.variants import (
    DTYPE_NAMES,
    LOOKUP,
    ON_CHIP,
    STRIP,
    Kernel,
    Launcher,
    Spec,
    Variant,
    spec_of,
)
from fewbits.kernels.backends.protocol import ABSENT, COUNTS
from fewbits.kernels.packing import operand_layout
from fewbits.kernels.quantizer import parts_of

# The fields of a Request from `out` to `sign_changes`: four addresses, the packed codes, five addresses, the seed, two
# addresses.
ADDRESSES = struct.Struct("=5Q2I8Q")
SIGNS = struct.Struct("=4I")
FIRST = struct.Struct("=2Q")  # the address of the arguments, which a launch needs, and the first argument: x's address
BACKWARDS = struct.Struct("=i")
HEAD = ctypes.sizeof(ctypes.c_void_p)  # the bytes in front of the arguments, which contain their address
REQUESTS = tuple(HEAD + Call.requests.offset + i * ctypes.sizeof(Request) for i in range(2))


class Scratch(NamedTuple):
    """Slices of a call's int64 memory for the statistics and the intermediate results of a job (one quantizer's work).

    One kernel writes intermediate results, and a later kernel of the call reads them. The memory is zero at first.
    """

    differences: slice  # Four Over Six: an int64 per block, the difference of the errors with its two candidate scales
    blocks: slice  # the amaxes of blocks, two in each int64
    groups: slice  # the amaxes of groups, two in each int64
    statistics: slice  # the counts of parts and, two in each int64, their amaxes; empty if they are not wanted
    grid: tuple[int, int]  # blocks down and across; (0, 0) if no kernel looks up amaxes of blocks
    group_count: int  # the number of groups
    parts: tuple[int, int]  # parts with statistics down and across; (0, 0) if no statistics are wanted

    def set_statistics(self, job: Job, memory: Tensor) -> None:
        """Let `job.counts` and `job.amax` be views of this memory, if statistics are wanted."""
        if self.parts[0]:
            own, count = memory[self.statistics], math.prod(self.parts)
            job.counts = own[: count * COUNTS].view(*self.parts, COUNTS)
            job.amax = own[count * COUNTS :].view(torch.float32)[:count].view(self.parts)

    def block_amax(self, scratch: Tensor) -> Tensor:
        return scratch[self.blocks].view(torch.int32)[: self.grid[0] * self.grid[1]].view(self.grid)

    def group_amax(self, scratch: Tensor) -> Tensor:
        return scratch[self.groups].view(torch.int32)[: self.group_count]


class Pass(NamedTuple):
    kernel: Kernel
    backwards: int  # 1: the last tile is processed first, because the pass before left it in the cache
    groups_after: bool  # True: after this pass, the amaxes of groups are computed from the amaxes of blocks


class Plan(NamedTuple):
    blocks: int  # the number of CTAs
    shared: int  # bytes of dynamic shared memory of a CTA
    passes: tuple[Pass, ...]
    template: bytes  # space for the address of the arguments, then the arguments
    room: type[ctypes.Array[ctypes.c_char]]  # the ctypes type of a copy of the template
    words: int  # the size of the scratch memory and of all statistics, in int64
    scratches: tuple[Scratch, ...]  # one for each job
    packed: tuple[tuple[int, int], ...]  # for each job: row_bytes and aligned of its packed codes (calls.Packed)


def prepare(launcher: Launcher, x: Tensor, jobs: tuple[Job, ...], aligned: bool) -> Plan:
    """Return the plan (the prepared kernel launches) of a call that computes one or two jobs on x, one per quantizer.

    aligned: True if x and all output matrices start at addresses that are multiples of 16 bytes.
    """
    in_strips = len(jobs) == 1 and divides_into_strips(x, jobs[0].q, jobs[0].axis)
    shape = _shape_for(x, jobs, in_strips)
    specs = tuple(_spec_for(job, x, shape, in_strips) for job in jobs)
    call = Call(None, *x.shape)
    call.aligned = aligned and x.shape[1] * x.itemsize % 16 == 0
    call.kept = tiles_kept(x, shape, launcher.shared_memory(x.device)) if in_strips else 0
    words, scratches = 0, []
    for i, (job, spec) in enumerate(zip(jobs, specs, strict=True)):
        _fill(call.requests[i], x, job, shape)
        scratches.append(_scratch(x, job, spec, words))
        words = scratches[-1].statistics.stop
    template = bytes(HEAD) + bytes(call)
    return Plan(
        -(-x.shape[1] // shape.cols) if in_strips else tile_count(x, shape),
        call.kept * shape.bytes(x.itemsize),
        tuple(_passes(launcher, x, jobs, specs, shape)),
        template,
        ctypes.c_char * len(template),
        words,
        tuple(scratches),
        tuple((call.requests[i].codes.row_bytes, call.requests[i].codes.aligned) for i in range(len(jobs))),
    )


def _shape_for(x: Tensor, jobs: tuple[Job, ...], in_strips: bool) -> Shape:
    if in_strips:
        return strip_shape(x)
    shape = fitting_shape(x, jobs[0].q, jobs[0].axis) if len(jobs) == 1 else usual_shape(x)
    # The codes of a thread's rows are transposed together, which a tile of one row does not have.
    return usual_shape(x) if shape.along and jobs[0].operand and jobs[0].axis == 0 else shape


@lru_cache(maxsize=4096)
def without_signs(spelling: str) -> str:
    """Return a quantizer's string form without the option for the signs of its Hadamard transform.

    Calls that differ only in these signs share a plan, because the signs are arguments of the kernels, not constants.
    """
    return ":".join(part for part in spelling.split(":") if not part.startswith("signs="))


def _passes(launcher: Launcher, x: Tensor, jobs: tuple[Job, ...], specs: tuple[Spec, ...], shape: Shape) -> list[Pass]:
    def kernel(name: str, **leave_out: Any) -> Kernel:
        # Fields of the specs that this pass does not use become 0, so that quantizers that differ only in these fields
        # share the kernel of this pass.
        needed = tuple(spec._replace(**leave_out) for spec in specs)
        return launcher.kernel(Variant("quantize.cu", name, (DTYPE_NAMES[x.dtype],), shape, needed), x.device)

    if specs[0].source == STRIP:
        return [Pass(kernel("quantize_strip"), 0, False)]
    traits, passes = [job.q.traits for job in jobs], []
    measured = any(spec.source == LOOKUP or row.groups for spec, row in zip(specs, traits, strict=True))
    if measured:
        grouped = any(spec.source == LOOKUP and row.groups for spec, row in zip(specs, traits, strict=True))
        measure = kernel("measure", stochastic=0, stats=0, skips=0, encodes=0, operand=0, piece=0)
        passes.append(Pass(measure, 0, grouped))
    if any(spec.source == LOOKUP and row.compares for spec, row in zip(specs, traits, strict=True)):
        passes.append(Pass(kernel("weigh", stats=0, skips=0, encodes=0, operand=0, piece=0), 0, False))
    return [*passes, Pass(kernel("quantize"), int(measured), False)]


def _spec_for(job: Job, x: Tensor, shape: Shape, in_strips: bool) -> Spec:
    block = None if in_strips else block_on_chip(job.q, job.axis, x, shape)
    rows, cols = block or (EDGE, EDGE)
    block_piece = 0
    if block is None:
        part = job.q.block.resolve(x.shape, job.axis)
        block_piece = parts_in(x, part, shape)[0]
        if covers_columns(x, part, shape) and not job.q.traits.compares:
            cols, block_piece = 1, COLUMNS
    counted = job.counted or job.skip is not ABSENT
    return spec_of(job.q, job.axis)._replace(
        ragged=int(job.q.hadamard is not None and x.shape[0 if job.axis == 0 else 1] % job.q.hadamard != 0),
        inverse=int(job.inverse),
        source=STRIP if in_strips else LOOKUP if block is None else ON_CHIP,
        block_rows=rows,
        block_cols=cols,
        stats=int(job.counted),
        skips=int(job.skip is not ABSENT),
        encodes=job.q.format.bits if job.stored else 0,
        operand=int(job.operand),
        piece=parts_in(x, job.partition or (MOST, MOST), shape)[0] if counted else 0,
        block_piece=block_piece,
        replayed=job.replayed,
    )


def _fill(request: Request, x: Tensor, job: Job, shape: Shape) -> None:
    """Write those fields of `request`, a kernel's arguments for one job, that all calls with one plan share.

    shape: the shape of a CTA's tile.
    """
    _, request.parts = parts_in(x, job.partition or (MOST, MOST), shape)
    _, request.blocks = parts_in(x, _block(x, job), shape)
    if job.stored:
        request.codes = packed_at(job.stored[0], job.q)
        request.nan_code, request.inf_code = nan_code(job.q.format), inf_code(job.q.format)
    if job.operand:
        places = operand_layout(job.q, job.axis, *x.shape)
        request.line_stride, request.block_stride = places.line_stride, places.block_stride


def _block(x: Tensor, job: Job) -> tuple[int, int]:
    return (1, x.shape[1]) if job.q.scaling == "none" else job.q.block.resolve(x.shape, job.axis)


def _scratch(x: Tensor, job: Job, spec: Spec, start: int) -> Scratch:
    grid = parts_of(x.shape, _block(x, job))
    groups = job.q.groups(grid, job.axis)
    looked_up = grid if spec.source == LOOKUP else (0, 0)
    count = looked_up[0] * looked_up[1]
    blocks = start + (count if job.q.traits.compares else 0)
    after = blocks + (count + 1) // 2
    statistics = after + (groups + 1) // 2
    parts = parts_of(x.shape, job.partition) if job.counted and job.partition else (0, 0)
    end = statistics + math.prod(parts) * COUNTS + (math.prod(parts) + 1) // 2
    return Scratch(
        *(slice(start, blocks), slice(blocks, after), slice(after, statistics), slice(statistics, end)),
        *(looked_up, groups, parts),
    )
