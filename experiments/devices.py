"""Choose the device of a trial, and set up its processes (ranks): one process, or as many as torchrun started."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from fewbits.experiments.trial import Runtime
from fewbits.kernels.backends.gpu import cuda

# Peak FLOP/s of dense BF16 products that are summed in FP32, as NVIDIA publishes it, by a part of the GPU's name. MFU
# (model FLOPs utilisation) is relative to it.
PEAK = {
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "GB300": 2500e12,
    "RTX 5070": 61.7e12,
    "RTX 5070 Ti": 87.9e12,
    "RTX 5080": 112.6e12,
    "RTX 5090": 209.5e12,
}
HEAP = 1 << 30  # bytes by which `_keep_memory` extends the heap, in huge pages
HUGE_PAGE, MADV_HUGEPAGE = 2 << 20, 14  # Linux on x86-64, and on ARM with pages of 4 KiB


@dataclass(frozen=True)
class World:
    """One process of a trial: its device and rank. `mean`, `total` and `greatest` reduce a tensor over all ranks."""

    device: torch.device
    rank: int = 0
    ranks: int = 1
    threads: int = 1  # number of threads on a CPU

    def mean(self, value: Tensor) -> Tensor:
        if self.ranks > 1:
            dist.all_reduce(value)
            value /= self.ranks
        return value

    def greatest(self, value: Tensor) -> Tensor:
        return self._reduced(value, dist.ReduceOp.MAX)

    def total(self, value: Tensor) -> Tensor:
        return self._reduced(value, dist.ReduceOp.SUM)

    def _reduced(self, value: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.ranks == 1:
            return value
        here = value.to(self.device)  # NCCL reduces tensors on its device
        dist.all_reduce(here, operation)
        return here.to(value.device)

    def agree(self, *requests: bool) -> tuple[bool, ...]:
        """Return, for each request, whether it is true on at least one rank. All ranks must call this together."""
        if self.ranks == 1:
            return requests
        flags = self.greatest(torch.tensor(requests, dtype=torch.int32, device=self.device))
        return tuple(map(bool, flags.tolist()))

    def wait(self) -> None:
        if self.ranks > 1:
            dist.barrier()


def choose(runtime: Runtime) -> World:
    """Set up torch for the trial (device, threads, determinism, process group of several ranks); return the World."""
    kind = kind_of_device(runtime)
    check_device(kind)
    _be_deterministic()
    if kind == "cpu":
        check_openmp(runtime.threads)
        torch.set_num_threads(runtime.threads)
        _keep_memory()
    rank, ranks, local = (int(os.environ.get(name, default)) for name, default in _TORCHRUN)
    device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)  # before NCCL, which otherwise opens a context on GPU 0 for every rank
    if ranks > 1 and not dist.is_initialized():
        backend, own = ("nccl", device) if kind == "cuda" else ("gloo", None)
        dist.init_process_group(backend, device_id=own)
    return World(device, rank, ranks, runtime.threads)


def kind_of_device(runtime: Runtime) -> str:
    """Return the requested kind of device, cpu or cuda; `auto` is cuda if this machine has a GPU, else cpu."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if runtime.device == "auto" else runtime.device


def rank_count() -> int:
    """Return the number of processes that torchrun started for the trial; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_device(kind: str) -> None:
    """Raise ValueError if this machine cannot train on this kind of device."""
    if kind == "cuda" and (complaint := cuda.complaint()):
        if not torch.cuda.is_available():
            raise ValueError(f"runtime.device cuda: {complaint}; valid values on this machine are auto and cpu")
        if os.environ.get("FEWBITS_BACKEND") != "reference":
            raise ValueError(f"runtime.device cuda: {complaint}; FEWBITS_BACKEND=reference is slow but works")


def copy(values: Tensor, to: torch.device | Tensor) -> Tensor:
    """Copy a host tensor to a device, or into a tensor there; the host does not wait until a GPU has copied it."""
    device = to.device if isinstance(to, Tensor) else to
    source = values.pin_memory() if device.type == "cuda" else values
    if isinstance(to, Tensor):
        return to.copy_(source, non_blocking=True)
    return source.to(device, non_blocking=True)


def leave(world: World) -> None:
    if world.ranks > 1 and dist.is_initialized():
        dist.destroy_process_group()


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak FLOP/s for dense BF16 products, or None if it is not a known GPU."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """Return the peak FLOP/s of the GPU with this name; None for one that PEAK lacks, of a laptop, or a part of one."""
    parts = [part for part in PEAK if re.search(rf"\b{part}\b", name) and not re.search(r"\b(Laptop|MIG)\b", name)]
    return PEAK[max(parts, key=len)] if parts else None


# The environment variables that torchrun sets, each with its value if torchrun is not used.
_TORCHRUN = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def check_openmp(threads: int) -> None:
    """Raise ValueError if OpenMP's environment variables allow fewer threads, because then the results would differ."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    dynamic = os.environ.get("OMP_DYNAMIC", "").lower() in ("true", "1")
    if threads > 1 and (dynamic or (limit.isdecimal() and int(limit) < threads)):
        variable = "OMP_DYNAMIC" if dynamic else f"OMP_THREAD_LIMIT={limit}"
        raise ValueError(f"runtime.threads {threads}: the environment variable {variable} allows fewer: unset it")


def _be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Products on GPUs are summed in FP32 and rounded once.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # FlashAttention is the fastest attention of torch with deterministic gradients. In FP32, which it does not
    # support, the memory-efficient one is deterministic in this mode, too; cuDNN's is not in all versions.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms(True) would load torch's compiler, too
    # In deterministic mode torch fills new tensors with NaN; this takes time and is not needed.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@cache
def _keep_memory() -> None:
    """Make glibc reuse freed memory blocks of up to 32 MiB, so that the tensors of every step do not cause page faults.

    Also extend the heap once by HEAP bytes, and ask Linux to use huge pages there, because the tensors of a step need
    more pages of 4 KiB than the TLB has entries. A page takes up memory from its first use on.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):
        return
    m_trim_threshold, m_mmap_threshold, m_mmap_max = -1, -3, -4
    libc.mallopt(m_mmap_threshold, 32 << 20)
    libc.mallopt(m_trim_threshold, (1 << 31) - 1)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mallopt(m_mmap_max, 0)  # so that this block becomes a part of the heap
    block = libc.malloc(HEAP)
    libc.mallopt(m_mmap_max, 1 << 16)  # the default
    if block:
        first = -(-block // HUGE_PAGE) * HUGE_PAGE
        libc.madvise(first, (block + HEAP - first) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)
        libc.free(block)
