"""Launch the CUDA kernels from the host: choose the variant, the grid, the pointers and the order of launches.

Device is a backend (reference.py defines its functions) that uses a Launcher. On GPUs, CuPy launches the kernels
(cuda.py); in tests an emulator runs the same sources on the CPU. No arithmetic happens here, and nothing waits for the
device: decisions during a call are made by kernels, or by torch on the device.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fewbits.kernels.backends import reference
from fewbits.kernels.packing import allocate
from fewbits.kernels.quantizer import GROUPED, Quantizer

DTYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16", torch.float32: "Fp32"}
SCALINGS = {"none": 0, "amax": 1, "gam": 2, "e8m0": 3, "mx": 4, "nvfp4": 5, "ue5m3": 6, "fouroversix": 7, "eden": 8}
COUNTS = 7
EDGE = 8  # rows, and columns, of the patch that one thread holds
WARP = 32
THREADS = 256
LONGEST_ROW = 64 * THREADS  # columns of one row that the threads of a CTA hold
TALL_THREADS = 512  # threads of a CTA that holds whole columns, sixteen side by side
INFINITE = 0x7F800000
MOST = (1 << 31) - (1 << 15)  # limit of rows and of columns, which kernels count in 32 bits


# Constants that kernels are compiled for: csrc/spec.cuh


class Shape(NamedTuple):
    """The shape of a CTA's tile: threads, how many of them lie side by side, and whether they all hold one row."""

    threads: int
    lanes: int
    along: int = 0

    @property
    def rows(self) -> int:
        return 1 if self.along else self.threads // self.lanes * EDGE

    @property
    def cols(self) -> int:
        return self.threads * EDGE * EDGE if self.along else self.lanes * EDGE


class Spec(NamedTuple):
    min_exponent: int
    dropped: int
    max: int  # floats as their bits
    overflow: int
    wide: int
    inf: int
    scaling: int
    stochastic: int
    group_by_row: int
    hadamard: int
    ragged: int
    inverse: int
    down: int
    lookup: int
    block_rows: int
    block_cols: int
    stats: int
    skips: int
    encodes: int
    piece: int
    block_piece: int


@dataclass(frozen=True)
class Variant:
    """A kernel and all its constants; `dtypes` are those of the matrix and of the second tensor in weights.cu."""

    file: str
    kernel: str
    dtypes: tuple[str, ...]
    shape: Shape
    specs: tuple[Spec, ...]

    def constants(self) -> dict[str, str]:
        names = ("FB_DTYPE", "FB_OTHER")
        return {
            "FB_KERNEL": self.kernel,
            **dict(zip(names, self.dtypes, strict=False)),
            "FB_SHAPE": ", ".join(map(str, self.shape)),
            "FB_SPECS": ", ".join(f"{{{', '.join(map(str, spec))}}}" for spec in self.specs),
            "FB_COUNT": str(len(self.specs)),
        }


class Launcher(Protocol):
    def launch(self, variant: Variant, blocks: int, call: ctypes.Structure, device: torch.device) -> None:
        """Queue the kernel with `blocks` CTAs on the device's current stream."""


# Arguments that kernels are called with: csrc/spec.cuh, csrc/decode.cu, csrc/weights.cu


class _Parts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("rows", "cols", "across", "lanes", "groups")]


class _Packed(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_void_p), ("row_bytes", ctypes.c_uint32), ("aligned", ctypes.c_uint32)]


class _Request(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("out", "tally", "part_amax", "skip")],
        ("codes", _Packed),
        *[(name, ctypes.c_void_p) for name in ("scales", "group_scales", "block_amax", "group_amax", "four_less_six")],
        ("seed", ctypes.c_uint64),
        ("signs", ctypes.c_uint32 * 4),
        ("parts", _Parts),
        ("blocks", _Parts),
        ("nan_code", ctypes.c_uint32),
        ("inf_code", ctypes.c_uint32),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p),
        *[(name, ctypes.c_int32) for name in ("rows", "cols", "backwards", "aligned")],
        ("requests", _Request * 2),
    ]


class _DecodeCall(ctypes.Structure):
    _fields_ = [
        ("codes", _Packed),
        *[(name, ctypes.c_void_p) for name in ("scales", "groups", "out")],
        *[(name, ctypes.c_int32) for name in ("rows", "cols", "across", "aligned")],
    ]


class _WeightCall(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("w", "grad", "bits", "noise", "out")],
        ("count", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        *[(name, ctypes.c_int32) for name in ("rows", "cols", "block", "uniform", "aligned", "unused")],
    ]


# The backend


@dataclass
class _Job:
    """The part of a call that one quantizer computes."""

    q: Quantizer
    axis: int
    seed: int
    out: Tensor | None = None
    counts: Tensor | None = None
    amax: Tensor | None = None
    partition: tuple[int, int] | None = None
    skip: Tensor | None = None
    stored: tuple[Tensor, Tensor, Tensor] | None = None  # codes, scales, group scales: replace values
    inverse: bool = False


class Device:
    never_waits = True  # callers must not wait either: that would stall the device and prevent CUDA graph capture

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

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
        partition: tuple[int, int] | None = None,
        skip: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if out is None and want_values:
            out = torch.empty_like(x)
        job = _Job(q, axis, seed, out, partition=partition, skip=skip)
        if want_stats:
            grid = _grid(x, partition or _whole_matrix(x))
            job.counts = torch.zeros(*grid, COUNTS, dtype=torch.int64, device=x.device)
            job.amax = torch.zeros(grid, device=x.device)
        self._run(x, [job])
        return out, job.counts, job.amax

    def quantize_both(
        self, x: Tensor, row: Quantizer, column: Quantizer, row_seed: int, column_seed: int
    ) -> tuple[Tensor, Tensor]:
        along, down = torch.empty_like(x), torch.empty_like(x)
        self._run(x, [_Job(row, -1, row_seed, along), _Job(column, 0, column_seed, down)])
        return along, down

    def encode(self, x: Tensor, q: Quantizer, axis: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        stored = allocate(q, axis, x)
        self._run(x, [_Job(q, axis, seed, stored=stored)])
        return stored

    def decode(
        self, codes: Tensor, scales: Tensor, groups: Tensor, q: Quantizer, axis: int, cols: int, dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty((codes.shape[0], cols), dtype=dtype, device=codes.device)
        _check_size(out)
        if out.numel():
            shape, across = _usual_shape(out), _grid(out, _block(q, axis, out))[1]
            call = _DecodeCall(_packed(codes, q), scales.data_ptr(), groups.data_ptr(), out.data_ptr(), *out.shape)
            call.across, call.aligned = across, _aligned(out)
            variant = Variant("decode.cu", "decode", (DTYPES[dtype],), shape, (_decoding(q, axis),))
            self._launcher.launch(variant, _tiles(out, shape), call, out.device)
        return out

    def rotate(self, x: Tensor, q: Quantizer, axis: int, inverse: bool = False) -> Tensor:
        if q.hadamard is None:
            return x
        out = torch.empty_like(x)
        turn = Quantizer("fp32", hadamard=q.hadamard, signs=q.signs)  # rotates, and rounds only to the dtype
        self._run(x, [_Job(turn, axis, 0, out, inverse=inverse)])
        return out

    def extent(self, x: Tensor, partition: tuple[int, int]) -> tuple[Tensor, Tensor]:
        grid = _grid(x, partition)
        amax, amin = torch.zeros(grid, device=x.device), torch.full(grid, float("inf"), device=x.device)
        _check_size(x)
        if x.numel():
            shape = _usual_shape(x)
            call = _Call(x.data_ptr(), *x.shape, aligned=_aligned(x))
            request = call.requests[0]
            request.block_amax, request.group_amax = amax.data_ptr(), amin.data_ptr()
            piece, request.parts = _parts(x, partition, shape)
            spec = _spec(Quantizer("fp32"), -1)._replace(piece=piece)
            variant = Variant("quantize.cu", "extent", (DTYPES[x.dtype],), shape, (spec,))
            self._launcher.launch(variant, _tiles(x, shape), call, x.device)
        return amax, amin

    def gaussian_noise(self, count: int, seed: int, device: torch.device) -> Tensor:
        words = torch.empty((count + 7) // 8, dtype=torch.int32, device=device)
        self._noise("gaussian_noise", words, seed, 4)
        return words

    def uniform_noise(self, count: int, seed: int, device: torch.device) -> Tensor:
        noise = torch.empty(count, dtype=torch.bfloat16, device=device)
        self._noise("uniform_noise", noise, seed, 8)
        return noise

    def sample_weight(self, w: Tensor, bits: Tensor, seed: int, noise: str, block: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(w.shape, dtype=dtype, device=w.device)
        drawn = self._draw(noise, w, seed)
        shape = _usual_shape(w)
        call = self._weights(w, bits, drawn, out, block)
        call.aligned = _aligned(w, out)
        square = Quantizer("e4m3", f"{block}x{block}", "amax")  # the kernel uses only its block
        spec = _spec(square, -1)._replace(block_rows=min(block, shape.rows), block_cols=min(block, shape.cols))
        self._launch_weights("sample_weight", (w.dtype, dtype), shape, spec, _tiles(w, shape), call, w)
        return out

    def sample_weight_backward(
        self, grad: Tensor, w: Tensor, bits: Tensor, seed: int, noise: str, block: int
    ) -> Tensor:
        out = torch.empty_like(bits)
        drawn = self._draw(noise, w, seed)
        call = self._weights(w, bits, drawn, out, block)
        call.grad = grad.data_ptr()
        rows, cols = w.shape
        blocks = -(-rows // block) * -(-cols // THREADS)
        shape, spec = Shape(THREADS, EDGE * 2), _spec(Quantizer("fp32"), -1)
        self._launch_weights("sample_weight_backward", (w.dtype, grad.dtype), shape, spec, blocks, call, w)
        return out

    # This is small or rare enough to use torch.
    unpack_noise = staticmethod(reference.unpack_noise)

    def _run(self, x: Tensor, jobs: Sequence[_Job]) -> None:
        _check_size(x)
        if not x.numel():
            return
        shape = _shape(x, jobs)
        specs = tuple(_spec_for(job, x, shape) for job in jobs)
        call = _Call(x.data_ptr(), *x.shape)
        call.aligned = _aligned(x, *(job.out for job in jobs if job.out is not None))
        buffers = [
            _fill(call.requests[i], x, job, spec, shape) for i, (job, spec) in enumerate(zip(jobs, specs, strict=True))
        ]
        names, tiles = (DTYPES[x.dtype],), _tiles(x, shape)
        measured = any(spec.lookup or _grouped(job.q) for job, spec in zip(jobs, specs, strict=True))
        if measured:
            # This pass does not depend on how values are rounded: quantizers that differ only in that share a kernel.
            shared_specs = tuple(spec._replace(stochastic=0, stats=0, skips=0, encodes=0, piece=0) for spec in specs)
            self._launcher.launch(Variant("quantize.cu", "measure", names, shape, shared_specs), tiles, call, x.device)
            for job, spec, (block_amax, group_amax, _) in zip(jobs, specs, buffers, strict=True):
                if spec.lookup and _grouped(job.q):
                    _group_amaxes(job, block_amax, group_amax)
        if any(spec.lookup and _weighs(job.q) for job, spec in zip(jobs, specs, strict=True)):
            shared_specs = tuple(spec._replace(stats=0, skips=0, encodes=0, piece=0) for spec in specs)
            self._launcher.launch(Variant("quantize.cu", "weigh", names, shape, shared_specs), tiles, call, x.device)
        call.backwards = measured
        self._launcher.launch(Variant("quantize.cu", "quantize", names, shape, specs), tiles, call, x.device)

    def _noise(self, kernel: str, out: Tensor, seed: int, each: int) -> None:
        if out.numel():
            call = _WeightCall(out=out.data_ptr(), count=out.numel(), seed=seed)
            shape, spec = Shape(THREADS, EDGE * 2), _spec(Quantizer("fp32"), -1)
            blocks = -(-out.numel() // (each * THREADS))
            self._launch_weights(kernel, (torch.bfloat16, torch.bfloat16), shape, spec, blocks, call, out)

    def _draw(self, noise: str, w: Tensor, seed: int) -> Tensor:
        draw = self.gaussian_noise if noise == "gaussian" else self.uniform_noise
        return draw(w.numel(), seed, w.device)

    def _weights(self, w: Tensor, bits: Tensor, noise: Tensor, out: Tensor, block: int) -> _WeightCall:
        call = _WeightCall(w=w.data_ptr(), bits=bits.data_ptr(), noise=noise.data_ptr(), out=out.data_ptr())
        _check_size(w)
        call.rows, call.cols = w.shape
        call.block, call.uniform = block, noise.dtype == torch.bfloat16
        return call

    def _launch_weights(
        self,
        kernel: str,
        dtypes: tuple[torch.dtype, torch.dtype],
        shape: Shape,
        spec: Spec,
        blocks: int,
        call: _WeightCall,
        on: Tensor,
    ) -> None:
        if blocks:
            names = tuple(DTYPES[dtype] for dtype in dtypes)
            self._launcher.launch(Variant("weights.cu", kernel, names, shape, (spec,)), blocks, call, on.device)


# Tiles


def _next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _usual_shape(x: Tensor) -> Shape:
    """Return the default tile: 128x128 for 256 threads; narrower and taller if the matrix is narrow."""
    return Shape(THREADS, min(2 * EDGE, _next_power_of_two(-(-x.shape[1] // EDGE))))


def _block_on_chip(q: Quantizer, axis: int, x: Tensor, shape: Shape) -> tuple[int, int] | None:
    """Return the quantizer's block as it lies in tiles of that shape, or None if a block does not fit in a tile.

    A naive cast has no blocks, so vectors take their place. A block as large as the matrix may be larger. Four Over Six
    compares two scales per block before it quantizes, which the threads of one warp do on chip.
    """
    if q.scaling == "none":
        return (1, EDGE)
    sides = []
    for size, have, tile in zip(_block(q, axis, x), x.shape, (shape.rows, shape.cols), strict=True):
        size = _next_power_of_two(size) if size >= have else size
        if size & (size - 1) or (size >= have and _next_power_of_two(have) > tile) or (size < have and size > tile):
            return None
        sides.append(min(size, tile))
    if _weighs(q) and sides[0] > WARP // shape.lanes * EDGE:
        return None
    return sides[0], sides[1]


def _shape(x: Tensor, jobs: Sequence[_Job]) -> Shape:
    """Return tiles that can hold the blocks of a single quantizer, channels included; otherwise the default tile."""
    usual, (rows, cols) = _usual_shape(x), x.shape
    if len(jobs) > 1 or _weighs(jobs[0].q) or _block_on_chip(jobs[0].q, jobs[0].axis, x, usual):
        return usual
    r, c = _block(jobs[0].q, jobs[0].axis, x)
    if r == 1 and c >= cols and cols <= LONGEST_ROW:
        threads = max(WARP, _next_power_of_two(-(-cols // EDGE**2)))
        return Shape(threads, threads, along=1)
    tall = Shape(max(2 * THREADS // EDGE, 2 * _next_power_of_two(-(-rows // EDGE))), 2)
    if c == 1 and r >= rows and tall.threads <= TALL_THREADS:
        return tall
    return usual


def _tiles(x: Tensor, shape: Shape) -> int:
    down, across = _grid(x, (shape.rows, shape.cols))
    return down * across


def _parts(x: Tensor, part: tuple[int, int], shape: Shape) -> tuple[int, _Parts]:
    """Return which piece (csrc/spec.cuh) lies within one part: the tile, a thread's patch, a vector or an element.

    The second result holds the sizes of parts, and how many lanes and groups of a warp share one.
    """
    (rows, cols), (r, c) = x.shape, part
    all_rows, all_cols = r >= rows, c >= cols
    tiles, patches, vectors, elements = range(4)
    lanes = WARP if shape.along else shape.lanes
    groups = WARP // lanes
    if (all_rows or r % shape.rows == 0) and (all_cols or c % shape.cols == 0):
        piece = tiles
    elif not all_cols and c % EDGE:
        piece = elements
    else:
        lanes = lanes if all_cols else min(lanes, _power_of_two_factor(c // EDGE))
        piece = vectors if shape.along or not (all_rows or r % EDGE == 0) else patches
        groups = groups if all_rows else min(groups, _power_of_two_factor(r // EDGE)) if r % EDGE == 0 else 1
    return piece, _Parts(min(r, MOST), min(c, MOST), -(-cols // c), lanes, groups)


def _power_of_two_factor(n: int) -> int:
    """Return the largest power of two that divides n."""
    return n & -n


# Quantizers


@lru_cache(maxsize=1024)  # with signs=each every GEMM may have new signs
def _spec(q: Quantizer, axis: int) -> Spec:
    f = q.format
    overflow = {"saturate": f.max, "nan": float("nan"), "inf": float("inf")}[q.overflow]
    return Spec(
        min_exponent=f.emin + 127 << 23,
        dropped=23 - f.mantissa_bits,
        max=_bits(f.max),
        overflow=_bits(overflow),
        wide=int(f.exponent_bits == 8),
        inf=int(f.has_inf),
        scaling=SCALINGS[q.scaling],
        stochastic=int(q.rounding == "stochastic"),
        group_by_row=int(q.group == "row"),
        hadamard=q.hadamard or 0,
        ragged=0,
        inverse=0,
        down=int(axis == 0),
        lookup=0,
        block_rows=1,
        block_cols=1,
        stats=0,
        skips=0,
        encodes=0,
        piece=0,
        block_piece=0,
    )


def _spec_for(job: _Job, x: Tensor, shape: Shape) -> Spec:
    block = _block_on_chip(job.q, job.axis, x, shape)
    rows, cols = block or (EDGE, EDGE)
    counted = job.counts is not None or job.skip is not None
    return _spec(job.q, job.axis)._replace(
        ragged=int(job.q.hadamard is not None and x.shape[0 if job.axis == 0 else 1] % job.q.hadamard != 0),
        inverse=int(job.inverse),
        lookup=int(block is None),
        block_rows=rows,
        block_cols=cols,
        stats=int(job.counts is not None),
        skips=int(job.skip is not None),
        encodes=job.q.format.bits if job.stored else 0,
        piece=_parts(x, job.partition or _whole_matrix(x), shape)[0] if counted else 0,
        block_piece=0 if block else _parts(x, _block(job.q, job.axis, x), shape)[0],
    )


def _decoding(q: Quantizer, axis: int) -> Spec:
    """Return the spec for decoding, without what does not matter to values on the grid.

    It has the quantizer's own blocks, so that matrices of all shapes share a kernel.
    """
    rows, cols = (min(n, MOST) for n in q.block.resolve(MOST, MOST, axis))
    spec = _spec(q, axis)
    return spec._replace(
        overflow=spec.max,
        stochastic=0,
        hadamard=0,
        lookup=1,
        encodes=q.format.bits,
        block_rows=rows,
        block_cols=cols,
    )


def _bits(value: float) -> int:
    return ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value


@lru_cache(maxsize=1024)
def _signs(q: Quantizer) -> tuple[int, int, int, int]:
    signs = reference.hadamard_signs(q, torch.device("cpu")).tolist() if q.hadamard else []
    negative = sum(1 << i for i, sign in enumerate(signs) if sign < 0)
    return (negative & 0xFFFFFFFF, negative >> 32 & 0xFFFFFFFF, negative >> 64 & 0xFFFFFFFF, negative >> 96)


def _grouped(q: Quantizer) -> bool:
    return q.scaling in GROUPED


def _weighs(q: Quantizer) -> bool:
    return q.scaling == "fouroversix"


def _group_count(q: Quantizer, axis: int, grid: tuple[int, int]) -> int:
    return 1 if q.group == "tensor" else grid[1] if axis == 0 else grid[0]


def _fill(request: _Request, x: Tensor, job: _Job, spec: Spec, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Fill a request; return the amaxes of blocks and of groups, and the error differences of Four Over Six.

    A first pass raises these from 0. The caller must hold them until all kernels are queued.
    """
    block = (1, x.shape[1]) if job.q.scaling == "none" else _block(job.q, job.axis, x)
    grid = _grid(x, block)
    block_amax = torch.zeros(grid if spec.lookup else 0, dtype=torch.int32, device=x.device)
    groups = _group_count(job.q, job.axis, grid) if _grouped(job.q) else 0
    group_amax = torch.zeros(groups, dtype=torch.int32, device=x.device)

    request.out, request.tally, request.part_amax = _pointer(job.out), _pointer(job.counts), _pointer(job.amax)
    request.skip = _pointer(job.skip)
    weighed = torch.zeros(grid if spec.lookup and _weighs(job.q) else 0, dtype=torch.int64, device=x.device)
    request.block_amax, request.group_amax = block_amax.data_ptr(), group_amax.data_ptr()
    request.four_less_six = weighed.data_ptr()
    request.seed, request.signs = job.seed, (ctypes.c_uint32 * 4)(*_signs(job.q))
    _, request.parts = _parts(x, job.partition or _whole_matrix(x), shape)
    _, request.blocks = _parts(x, block, shape)
    if job.stored:
        f, (codes, scales, group_scales) = job.q.format, job.stored
        request.codes = _packed(codes, job.q)
        request.scales, request.group_scales = scales.data_ptr(), group_scales.data_ptr()
        request.nan_code = f.code_of(float("nan")) if f.has_nan else 0
        request.inf_code = f.code_of(float("inf"), "inf") if f.has_inf else 0
    return block_amax, group_amax, weighed


def _group_amaxes(job: _Job, block_amax: Tensor, group_amax: Tensor) -> None:
    """Compute group amaxes from block amaxes that are finite; positive floats compare like their bits."""
    finite = torch.where(block_amax < INFINITE, block_amax, 0)
    if job.q.group == "tensor":
        group_amax.copy_(finite.amax().view(1))
    else:
        group_amax.copy_(finite.amax(0 if job.axis == 0 else 1))


# Tensors


def _block(q: Quantizer, axis: int, x: Tensor) -> tuple[int, int]:
    rows, cols = x.shape
    return q.block.resolve(rows, cols, axis)


def _check_size(x: Tensor) -> None:
    if max(x.shape) >= MOST:
        raise ValueError(
            f"matrix {x.shape[0]} x {x.shape[1]} is too large: the CUDA kernels support {MOST - 1} per dimension"
        )


def _packed(codes: Tensor, q: Quantizer) -> _Packed:
    """Describe packed codes to a kernel.

    Aligned: every eight columns start at a multiple of the largest power of two that divides their bytes.
    """
    word = _power_of_two_factor(q.format.stored_bits)
    return _Packed(codes.data_ptr(), codes.shape[1], codes.data_ptr() % word == 0 and codes.shape[1] % word == 0)


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _aligned(*tensors: Tensor) -> bool:
    return all(t.data_ptr() % 16 == 0 and t.shape[1] * t.itemsize % 16 == 0 for t in tensors)


def _whole_matrix(x: Tensor) -> tuple[int, int]:
    return max(x.shape[0], 1), max(x.shape[1], 1)


def _grid(x: Tensor, part: tuple[int, int]) -> tuple[int, int]:
    return -(-x.shape[0] // part[0]), -(-x.shape[1] // part[1])
