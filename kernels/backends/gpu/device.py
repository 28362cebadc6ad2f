"""Launch the CUDA kernels from the host: choose their variants, grids, arguments and order.

Device is a backend (protocol.py) that uses a Launcher. On GPUs, CuPy launches the kernels (cuda.py); in tests an
emulator runs the same sources on the CPU. This module contains no arithmetic. The GPU, or the emulator, makes all
decisions that depend on data, so the host never waits.
"""

import ctypes
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbits.kernels.backends import reference
from fewbits.kernels.backends.compiled import Compiled, DecideCall, Job
from fewbits.kernels.backends.constants import sign_words
from fewbits.kernels.backends.gpu.calls import (
    Call,
    DecodeCall,
    Observation,
    ObserveCall,
    WeightCall,
    aligned,
    packed_at,
)
from fewbits.kernels.backends.gpu.layers import Layers
from fewbits.kernels.backends.gpu.plans import (
    ADDRESSES,
    BACKWARDS,
    FIRST,
    HEAD,
    REQUESTS,
    SIGNS,
    Plan,
    Scratch,
    prepare,
    without_signs,
)
from fewbits.kernels.backends.gpu.tiles import EDGE, MOST, THREADS, Shape, parts_in, tile_count, usual_shape
from fewbits.kernels.backends.gpu.variants import DTYPE_NAMES, LOOKUP, Kernel, Launcher, Spec, Variant, spec_of
from fewbits.kernels.backends.protocol import ABSENT, COUNTS, OBSERVED_AT_ONCE, Part, Stored
from fewbits.kernels.quantizer import Quantizer, parts_of
from fewbits.kernels.reference.noise import Noise
from fewbits.kernels.replays import CapturedSeeds, capture

INFINITE = 0x7F800000
NOISE_EACH = {"gaussian": 4, "uniform": 8}  # packed words (gaussian) or elements (uniform) that one thread draws
MOST_PLANS = 4096  # the number of plans that are kept; a training step needs a few for each kind of layer
FLAT = Shape(THREADS, 2 * EDGE)  # the shape for kernels that do not divide a matrix into tiles
NO_SPEC = spec_of(Quantizer("fp32"), -1)  # the spec for kernels that do not quantize
OBSERVE = Variant("observe.cu", "observe", ("Fp32",), FLAT, (NO_SPEC,))
DECIDE = Variant("decide.cu", "decide", ("Fp32",), FLAT, (NO_SPEC,))


class Device(Compiled):
    name = "cuda"
    never_waits = True

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.layers = Layers(launcher)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._deciders: dict[int | None, Kernel] = {}  # by the index of the device

    def rotate(self, x: Tensor, q: Quantizer, axis: int, inverse: bool = False) -> Tensor:
        if q.hadamard is None:
            return x
        out = torch.empty_like(x)
        self._run(x, Job(_rotation_of(q), axis, 0, out, inverse=inverse))
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

    compare = staticmethod(reference.compare)

    def matmul_fp32(self, a: Tensor, b: Tensor) -> Tensor:
        return reference.matmul_fp32(a, b)  # products.py calls torch directly on CUDA

    def observe(self, table: Tensor, counts: list[Tensor], choices: list[Tensor], rows: list[int]) -> None:
        observations = [
            Observation(c.data_ptr(), choice.data_ptr(), c.numel() // COUNTS, row)
            for c, choice, row in zip(counts, choices, rows, strict=True)
        ]
        call = ObserveCall(table.data_ptr(), (Observation * OBSERVED_AT_ONCE)(*observations))
        self._launch(OBSERVE, len(observations), call, table.device)

    def _run(self, x: Tensor, *jobs: Job) -> None:
        if not x.numel():
            _check_size(x)
            for job in jobs:
                job.set_statistics(x)
            return
        start = x.data_ptr()
        every_address, addresses = start, []
        key: list[Any] = [x.shape, x.dtype, x.get_device()]
        replays = capture()
        for job in jobs:
            changes = (0, 0) if replays is None else _changes(replays, job)
            job.replayed = bool(changes[0]) + 2 * bool(changes[1])
            out, skip = job.out.data_ptr(), job.skip.data_ptr()
            codes, scales, groups = (0, 0, 0) if job.stored is None else (t.data_ptr() for t in job.stored)
            every_address |= out
            addresses.append((out, skip, codes, scales, groups, *changes))
            name = job.q.spelling if job.q.hadamard is None else without_signs(job.q.spelling)
            wanted = bool(out), job.counted, bool(skip), bool(codes), codes & 15, job.operand
            key += (name, job.axis, job.partition, job.inverse, wanted, job.replayed)
        aligned = every_address & 15 == 0
        key.append(aligned)
        plan = self._plans.get(tuple(key))
        if plan is None:
            _check_size(x)
            plan = self._keep(tuple(key), prepare(self._launcher, x, jobs, aligned))
        self._launch_plan(plan, x, start, jobs, addresses)

    def _launch_plan(self, plan: Plan, x: Tensor, start: int, jobs: tuple[Job, ...], addresses: list[Any]) -> None:
        memory = torch.zeros(plan.words, dtype=torch.int64, device=x.device) if plan.words else ABSENT
        base = memory.data_ptr()
        arguments = plan.room.from_buffer_copy(plan.template)
        at = ctypes.addressof(arguments)
        FIRST.pack_into(arguments, 0, at + HEAD, start)
        for job, request, own, packed, (out, skip, codes, scales, groups, *changes) in zip(
            jobs, REQUESTS, plan.scratches, plan.packed, addresses, strict=False
        ):
            own.set_statistics(job, memory)
            block_amax, group_amax = base + 8 * own.blocks.start, base + 8 * own.groups.start
            if _is_own_group(job, own):
                group_amax = block_amax
            ADDRESSES.pack_into(
                *(arguments, request, out, job.counts.data_ptr(), job.amax.data_ptr(), skip),
                *(codes, *packed, scales, groups, block_amax, group_amax, base + 8 * own.differences.start),
                *(job.seed, *changes),
            )
            if job.q.hadamard is not None:
                SIGNS.pack_into(arguments, request + ADDRESSES.size, *sign_words(job.q))
        for kernel, backwards, groups_after in plan.passes:
            if backwards:
                BACKWARDS.pack_into(arguments, HEAD + Call.backwards.offset, backwards)
            kernel(plan.blocks, plan.shared, at)
            if groups_after:
                for job, own in zip(jobs, plan.scratches, strict=True):
                    if own.group_count and own.grid[0] and not _is_own_group(job, own):
                        _group_amaxes(job, own.block_amax(memory), own.group_amax(memory))

    def _keep(self, key: tuple[Any, ...], plan: Plan) -> Plan:
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _launch(self, variant: Variant, blocks: int, call: ctypes.Structure, device: torch.device) -> None:
        """Launch a kernel on `blocks` CTAs (thread blocks) with the arguments `call`.

        The methods `_run` and `_decide` do not use this method: they launch kernels that they have cached.
        """
        _queue(self._launcher.kernel(variant, device), blocks, call)

    def _decode(self, stored: Stored, q: Quantizer, axis: int, out: Tensor) -> None:
        _check_size(out)
        codes, scales, groups = stored
        call = DecodeCall(packed_at(codes, q), scales.data_ptr(), groups.data_ptr(), out.data_ptr(), *out.shape)
        call.across, call.aligned = parts_of(out.shape, q.block.resolve(out.shape, axis))[1], aligned(out)
        shape = usual_shape(out)
        variant = Variant("decode.cu", "decode", (DTYPE_NAMES[out.dtype],), shape, (_decoding(q, axis),))
        self._launch(variant, tile_count(out, shape), call, out.device)

    def _extent(self, x: Tensor, partition: Part, amax: Tensor, amin: Tensor) -> None:
        _check_size(x)
        shape, call = usual_shape(x), Call(x.data_ptr(), *x.shape, aligned=aligned(x))
        request = call.requests[0]
        request.block_amax, request.group_amax = amax.data_ptr(), amin.data_ptr()
        piece, request.parts = parts_in(x, partition, shape)
        variant = Variant("quantize.cu", "extent", (DTYPE_NAMES[x.dtype],), shape, (NO_SPEC._replace(piece=piece),))
        self._launch(variant, tile_count(x, shape), call, x.device)

    def _decide(self, call: DecideCall, device: torch.device) -> bool:
        kernel = self._deciders.get(device.index)
        if kernel is None:
            kernel = self._deciders[device.index] = self._launcher.kernel(DECIDE, device)
        _queue(kernel, -(-call.blocks // THREADS), call)
        return True

    def _draw(self, noise: Noise, out: Tensor, seed: int) -> None:
        call = WeightCall(out=out.data_ptr(), count=out.numel(), seed=seed)
        replays = capture()
        call.seed_offset = 0 if replays is None else replays.address(seed)
        spec = NO_SPEC._replace(replayed=int(bool(call.seed_offset)))
        variant = Variant("weights.cu", f"{noise}_noise", ("Bf16", "Bf16"), FLAT, (spec,))
        if out.numel():
            blocks = -(-out.numel() // (NOISE_EACH[noise] * THREADS))
            self._launch(variant, blocks, call, out.device)

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
        """Draw the noise for the weight w, and launch the kernel `variant`, which reads both and writes `out`.

        blocks: the number of CTAs (thread blocks). bits: one bit width for each square of `block` rows and columns of
        w. noise: the distribution of the noise. own: further fields of the kernel's WeightCall.
        """
        _check_size(w)
        draw = self.gaussian_noise if noise == "gaussian" else self.uniform_noise
        drawn = draw(w.numel(), seed, w.device)
        call = WeightCall(w=w.data_ptr(), bits=bits.data_ptr(), noise=drawn.data_ptr(), out=out.data_ptr(), **own)
        call.rows, call.cols, call.block, call.uniform = *w.shape, block, noise == "uniform"
        if blocks:
            self._launch(variant, blocks, call, w.device)


def _is_own_group(job: Job, own: Scratch) -> bool:
    """Tell whether a kernel can read the amax of a single block as that of its group.

    They differ only if the block is not finite. Then the values are NaN, but encoding stores the scale of the group.
    """
    return own.grid == (1, 1) and job.stored is None


def _changes(replays: CapturedSeeds, job: Job) -> tuple[int, int]:
    """Return the addresses from which the kernels of a captured job read the changes of its seed and of its signs."""
    signs = job.q.signs
    return replays.address(job.seed), replays.address(signs, signs=True) if isinstance(signs, int) else 0


def _queue(kernel: Kernel, blocks: int, call: ctypes.Structure) -> None:
    arguments = ctypes.c_void_p(ctypes.addressof(call))
    kernel(blocks, 0, ctypes.addressof(arguments))


@lru_cache(maxsize=1024)
def _rotation_of(q: Quantizer) -> Quantizer:
    """Return a quantizer that only rotates, with q's transform: its format is fp32, without a scaling."""
    return Quantizer("fp32", hadamard=q.hadamard, signs=q.signs)


def _decoding(q: Quantizer, axis: int) -> Spec:
    """Return the constants of the kernel that decodes what this quantizer encoded.

    Fields that do not affect decoding have fixed values, so that more quantizers share a kernel. Scale blocks
    that extend over the whole matrix get a fixed size, so that matrices of all shapes share a kernel.
    """
    rows, cols = (min(n, MOST) for n in q.block.resolve((MOST, MOST), axis))
    spec = spec_of(q, axis)
    return spec._replace(
        grid=spec.grid._replace(overflow=spec.grid.max),
        stochastic=0,
        hadamard=0,
        source=LOOKUP,
        encodes=q.format.bits,
        block_rows=rows,
        block_cols=cols,
    )


def _group_amaxes(job: Job, block_amax: Tensor, group_amax: Tensor) -> None:
    """Write the amax of each group of blocks, computed from the finite amaxes of its blocks, into `group_amax`.

    The job's quantizer defines the groups (`Quantizer.group`). Both tensors contain the bits of floats as integers,
    because positive floats and their bits have the same order.
    """
    finite = torch.where(block_amax < INFINITE, block_amax, 0)
    if job.q.group == "tensor":
        group_amax.copy_(finite.amax().view(1))
        return
    lines = finite if job.axis == -1 else finite.t()
    n = min(job.q.group_blocks, lines.shape[1])
    groups = F.pad(lines, (0, -lines.shape[1] % n)).unflatten(1, (-1, n)).amax(2)
    group_amax.copy_((groups if job.axis == -1 else groups.t()).flatten())


def _check_size(x: Tensor) -> None:
    if max(x.shape) >= MOST:
        raise ValueError(
            f"matrix {x.shape[0]} x {x.shape[1]} is too large: the CUDA kernels support at most {MOST - 1} rows and at "
            f"most {MOST - 1} columns"
        )
