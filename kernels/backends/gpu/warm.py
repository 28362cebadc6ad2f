"""Find the CUDA kernels that a training run will launch, and compile them in parallel before the run.

Neither step launches a kernel, and neither needs a GPU. Compiling a kernel takes half a second of one core; a training
run needs some dozens of kernels.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from fewbits.kernels.backends.choice import replaced_by
from fewbits.kernels.backends.gpu import cubins
from fewbits.kernels.backends.gpu.device import Device
from fewbits.kernels.backends.gpu.variants import Kernel, Variant


class Recorder:
    """A launcher that only records which kernels a call would launch."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []

    def kernel(self, variant: Variant, device: torch.device) -> Kernel:
        return lambda blocks, shared, arguments: self.variants.append(variant)

    def shared_memory(self, device: torch.device) -> int:
        return 0  # the variants do not depend on the size of shared memory


def kernels_of(calls: Iterable[Callable[[], object]]) -> list[Variant]:
    """Return the kernels that these calls of public functions or operators would launch on a GPU, without duplicates.

    The calls must use tensors on the CPU. Kernels are only recorded and not run, so the results of the calls are
    undefined.
    """
    recorder = Recorder()
    with replaced_by(Device(recorder)):
        for call in calls:
            call()
    return list(dict.fromkeys(recorder.variants))


def compile_all(variants: Iterable[Variant], architecture: str) -> int:
    """Compile the kernels that are not cached, one at a time on each core; return the number of different kernels.

    The number includes the cached kernels. Raise BuildError if NVRTC is missing or fails.
    """
    cubins.nvrtc()
    sources = dict.fromkeys(variant.source() for variant in variants)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # NVRTC runs without Python's lock
        return len(list(pool.map(lambda source: len(cubins.cubin(source, architecture)), sources)))
