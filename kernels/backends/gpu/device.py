"""Launch the CUDA kernels from the host: choose their variants, grids, arguments and order.

Device is a backend (protocol.py) that uses a Launcher. On GPUs, CuPy launches the kernels (cuda.py); in tests an
emulator runs the same sources on the CPU. This module contains no arithmetic, and the host never waits for the device:
all decisions that depend on data are made on the device.
"""

from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.backends import reference
from fewbits.kernels.backends.compiled import Compiled, Job, pointer
from fewbits.kernels.backends.constants import inf_code, nan_code, sign_words
from fewbits.kernels.backends.gpu.calls import Call, DecodeCall, Request, WeightCall, aligned, packed_at
from fewbits.kernels.backends.gpu.tiles import (
    EDGE,
    MOST,
    THREADS,
    Shape,
    block_on_chip,
    fitting_shape,
    parts_in,
    tile_count,
    usual_shape,
)
from fewbits.kernels.backends.gpu.variants import DTYPE_NAMES, Launcher, Spec, Variant, spec_of
from fewbits.kernels.backends.protocol import ABSENT, Noise, Part, Stored
from fewbits.kernels.quantizer import Quantizer, parts_of

INFINITE = 0x7F800000
NOISE_EACH = {"gaussian": 4, "uniform": 8}  # packed words (gaussian) or elements (uniform) that one thread draws
FLAT = Shape(THREADS, 2 * EDGE)  # the shape for kernels that do not divide a matrix into tiles
NO_SPEC = spec_of(Quantizer("fp32"), -1)  # the spec for kernels that do not quantize


class Device(Compiled):
    name = "cuda"
    never_waits = True

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def rotate(self, x: Tensor, q: Quantizer, axis: int, inverse: bool = False) -> Tensor:
        if q.hadamard is None:
            return x
        out = torch.empty_like(x)
        turn = Quantizer("fp32", hadamard=q.hadamard, signs=q.signs)  # rotates, and rounds only to the dtype
        self._run(x, Job(turn, axis, 0, out, inverse=inverse))
        return out

    def sample_weight(self, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int, dtype: torch.dtype) -> Tensor:
        out, shape = torch.empty(w.shape, dtype=dtype, device=w.device), usual_shape(w)
        square = Quantizer("e4m3", f"{block}x{block}", "amax")  # the kernel uses only its block
        spec = spec_of(square, -1)._replace(block_rows=min(block, shape.rows), block_cols=min(block, shape.cols))
        variant = Variant("weights.cu", "sample_weight", (DTYPE_NAMES[w.dtype], DTYPE_NAMES[dtype]), shape, (spec,))
        self._launch_weights(variant, tile_count(w, shape), w, bits, seed, noise, block, out, aligned=aligned(w, out))
        return out

    def sample_weight_backward(
        self, grad: Tensor, w: Tensor, bits: Tensor, seed: int, noise: Noise, block: int
    ) -> Tensor:
        out, names = torch.empty_like(bits), (DTYPE_NAMES[w.dtype], DTYPE_NAMES[grad.dtype])
        down, across = parts_of(w.shape, (block, THREADS))
        variant = Variant("weights.cu", "sample_weight_backward", names, FLAT, (NO_SPEC,))
        self._launch_weights(variant, down * across, w, bits, seed, noise, block, out, grad=grad.data_ptr())
        return out

    def matmul_fp32(self, a: Tensor, b: Tensor) -> Tensor:
        return reference.matmul_fp32(a, b)  # products.py calls torch directly on CUDA

    def _run(self, x: Tensor, *jobs: Job) -> None:
        _check_size(x)
        if not x.numel():
            return
        shape = fitting_shape(x, jobs[0].q, jobs[0].axis) if len(jobs) == 1 else usual_shape(x)
        specs = tuple(_spec_for(job, x, shape) for job in jobs)
        call = Call(x.data_ptr(), *x.shape)
        call.aligned = aligned(x, *(job.out for job in jobs if job.out is not ABSENT))
        buffers = [
            _fill(call.requests[i], x, job, spec, shape) for i, (job, spec) in enumerate(zip(jobs, specs, strict=True))
        ]

        def launch(kernel: str, **leave_out: Any) -> None:
            # The fields that this pass does not use become 0, so quantizers that differ only in them share its kernel.
            needed = tuple(spec._replace(**leave_out) for spec in specs)
            variant = Variant("quantize.cu", kernel, (DTYPE_NAMES[x.dtype],), shape, needed)
            self._launcher.launch(variant, tile_count(x, shape), call, x.device)

        traits = [job.q.traits for job in jobs]
        measured = any(spec.lookup or row.groups for spec, row in zip(specs, traits, strict=True))
        if measured:
            launch("measure", stochastic=0, stats=0, skips=0, encodes=0, piece=0)
            for job, spec, (block_amax, group_amax, _) in zip(jobs, specs, buffers, strict=True):
                if spec.lookup and job.q.traits.groups:
                    _group_amaxes(job, block_amax, group_amax)
        if any(spec.lookup and row.compares for spec, row in zip(specs, traits, strict=True)):
            launch("weigh", stats=0, skips=0, encodes=0, piece=0)
        call.backwards = measured
        launch("quantize")

    def _decode(self, stored: Stored, q: Quantizer, axis: int, out: Tensor) -> None:
        _check_size(out)
        codes, scales, groups = stored
        call = DecodeCall(packed_at(codes, q), scales.data_ptr(), groups.data_ptr(), out.data_ptr(), *out.shape)
        call.across, call.aligned = parts_of(out.shape, q.block.resolve(out.shape, axis))[1], aligned(out)
        shape = usual_shape(out)
        variant = Variant("decode.cu", "decode", (DTYPE_NAMES[out.dtype],), shape, (_decoding(q, axis),))
        self._launcher.launch(variant, tile_count(out, shape), call, out.device)

    def _extent(self, x: Tensor, partition: Part, amax: Tensor, amin: Tensor) -> None:
        _check_size(x)
        shape, call = usual_shape(x), Call(x.data_ptr(), *x.shape, aligned=aligned(x))
        request = call.requests[0]
        request.block_amax, request.group_amax = amax.data_ptr(), amin.data_ptr()
        piece, request.parts = parts_in(x, partition, shape)
        variant = Variant("quantize.cu", "extent", (DTYPE_NAMES[x.dtype],), shape, (NO_SPEC._replace(piece=piece),))
        self._launcher.launch(variant, tile_count(x, shape), call, x.device)

    def _draw(self, noise: Noise, out: Tensor, seed: int) -> None:
        call = WeightCall(out=out.data_ptr(), count=out.numel(), seed=seed)
        variant = Variant("weights.cu", f"{noise}_noise", ("Bf16", "Bf16"), FLAT, (NO_SPEC,))
        if out.numel():
            blocks = -(-out.numel() // (NOISE_EACH[noise] * THREADS))
            self._launcher.launch(variant, blocks, call, out.device)

    def _launch_weights(
        self,
        variant: Variant,
        blocks: int,
        w: Tensor,
        bits: Tensor,
        seed: int,
        noise: Noise,
        block: int,
        out: Tensor,
        **own: int,
    ) -> None:
        """Draw the noise, and launch a kernel that reads it and the weight; `own` are more fields of its WeightCall."""
        _check_size(w)
        draw = self.gaussian_noise if noise == "gaussian" else self.uniform_noise
        drawn = draw(w.numel(), seed, w.device)
        call = WeightCall(w=w.data_ptr(), bits=bits.data_ptr(), noise=drawn.data_ptr(), out=out.data_ptr(), **own)
        call.rows, call.cols, call.block, call.uniform = *w.shape, block, noise == "uniform"
        if blocks:
            self._launcher.launch(variant, blocks, call, w.device)


def _spec_for(job: Job, x: Tensor, shape: Shape) -> Spec:
    block = block_on_chip(job.q, job.axis, x, shape)
    rows, cols = block or (EDGE, EDGE)
    counted = job.counts is not ABSENT or job.skip is not ABSENT
    return spec_of(job.q, job.axis)._replace(
        ragged=int(job.q.hadamard is not None and x.shape[0 if job.axis == 0 else 1] % job.q.hadamard != 0),
        inverse=int(job.inverse),
        lookup=int(block is None),
        block_rows=rows,
        block_cols=cols,
        stats=int(job.counts is not ABSENT),
        skips=int(job.skip is not ABSENT),
        encodes=job.q.format.bits if job.stored else 0,
        piece=parts_in(x, job.partition or (MOST, MOST), shape)[0] if counted else 0,
        block_piece=0 if block else parts_in(x, job.q.block.resolve(x.shape, job.axis), shape)[0],
    )


def _decoding(q: Quantizer, axis: int) -> Spec:
    """Return the constants of the kernel that decodes what this quantizer encoded.

    Fields that do not affect decoding have fixed values, so that more quantizers share a kernel. The block is not cut
    to the size of a matrix, so that matrices of all shapes share a kernel.
    """
    rows, cols = (min(n, MOST) for n in q.block.resolve((MOST, MOST), axis))
    spec = spec_of(q, axis)
    return spec._replace(
        grid=spec.grid._replace(overflow=spec.grid.max),
        stochastic=0,
        hadamard=0,
        lookup=1,
        encodes=q.format.bits,
        block_rows=rows,
        block_cols=cols,
    )


def _fill(request: Request, x: Tensor, job: Job, spec: Spec, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Write one job into a request of a kernel's call, and return the buffers to which the request points.

    The buffers are for the amaxes of blocks, the amaxes of groups, and the difference between the errors of Four Over
    Six's two candidates. They start as 0, and the first passes fill them. The caller must keep them until all kernels
    are queued.
    """
    block = (1, x.shape[1]) if job.q.scaling == "none" else job.q.block.resolve(x.shape, job.axis)
    grid = parts_of(x.shape, block)
    block_amax = torch.zeros(grid if spec.lookup else 0, dtype=torch.int32, device=x.device)
    group_amax = torch.zeros(job.q.groups(grid, job.axis), dtype=torch.int32, device=x.device)

    request.out, request.tally, request.part_amax = pointer(job.out), pointer(job.counts), pointer(job.amax)
    request.skip = pointer(job.skip)
    weighed = torch.zeros(grid if spec.lookup and job.q.traits.compares else 0, dtype=torch.int64, device=x.device)
    request.block_amax, request.group_amax = block_amax.data_ptr(), group_amax.data_ptr()
    request.four_less_six = weighed.data_ptr()
    request.seed, request.signs = job.seed, sign_words(job.q)
    _, request.parts = parts_in(x, job.partition or (MOST, MOST), shape)
    _, request.blocks = parts_in(x, block, shape)
    if job.stored:
        codes, scales, group_scales = job.stored
        request.codes = packed_at(codes, job.q)
        request.scales, request.group_scales = scales.data_ptr(), group_scales.data_ptr()
        request.nan_code, request.inf_code = nan_code(job.q.format), inf_code(job.q.format)
    return block_amax, group_amax, weighed


def _group_amaxes(job: Job, block_amax: Tensor, group_amax: Tensor) -> None:
    """Compute the amax of each group from the finite amaxes of its blocks.

    Both tensors hold the bits of floats as integers, because positive floats and their bits have the same order.
    """
    finite = torch.where(block_amax < INFINITE, block_amax, 0)
    if job.q.group == "tensor":
        group_amax.copy_(finite.amax().view(1))
    else:
        group_amax.copy_(finite.amax(0 if job.axis == 0 else 1))


def _check_size(x: Tensor) -> None:
    if max(x.shape) >= MOST:
        raise ValueError(
            f"matrix {x.shape[0]} x {x.shape[1]} is too large: the CUDA kernels support up to {MOST - 1} rows and "
            "as many columns"
        )
