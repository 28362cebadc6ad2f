"""Give the kernels of a captured training step new seeds in each replay of the capture (CUDA graphs).

A captured kernel keeps the arguments of the captured step, so its seed would never change. Therefore it also has an
address in device memory, and adds the number there to its seed; before each replay, the host writes the differences
between the seeds of this step and those of the captured step. Signs of Hadamard transforms, which are drawn from a
seed, change in the same way, by the bits in which the words of the two steps differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fewbits.kernels.reference.noise import philox4x32
from fewbits.kernels.seeds import derive_seed

SIGNS = 3  # Philox's stream of signs (csrc/philox.h)
CHUNK = 1 << 12  # slots that are allocated together
SLOT = 16  # bytes: the difference of a seed, or the differences of the four words of signs


class CapturedSeeds:
    """The seeds that the kernels of one captured step use, and the device memory from which they read the changes.

    Another object, `earlier`, must be used for a run of the step before the capture, which loads the kernels: its
    changes are 0. It says how much memory the capture needs. That memory must not be allocated during the capture: it
    would be in the graph's own pool, where kernels of the graph write temporary tensors to the same place.
    """

    def __init__(self, device: torch.device, earlier: CapturedSeeds | None = None) -> None:
        self._device = device
        self._parts: dict[int, tuple[int, ...]] = {}  # what a seed of the step is derived from, without the step
        self._slots: dict[tuple[int, bool], int] = {}  # a seed, and whether signs are drawn from it: number of its slot
        self._chunks: list[Tensor] = [self._new_chunk() for _ in earlier._chunks] if earlier else []
        self._host: Tensor | None = None

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Record the seeds of a step that is captured in the `with` block."""
        global _capture
        assert _capture is None
        _capture = self
        try:
            yield
        finally:
            _capture = None

    def address(self, seed: int, *, signs: bool = False) -> int:
        """Return the address of the change of a seed, or of its signs; 0 if the seed is the same in all steps."""
        if seed not in self._parts:
            return 0
        slot = self._slots.setdefault((seed, signs), len(self._slots))
        if slot == len(self._chunks) * CHUNK:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("the captured step uses more seeds than the step before it")
            self._chunks.append(self._new_chunk())
        return self._chunks[slot // CHUNK].data_ptr() + slot % CHUNK * SLOT

    def _new_chunk(self) -> Tensor:
        return torch.zeros(CHUNK, SLOT // 8, dtype=torch.int64, device=self._device)

    def set_step(self, step: int) -> None:
        """Write the changes for a replay as the given step; it must be called before each replay."""
        if not self._slots:
            return
        if self._host is None:
            pinned = self._device.type == "cuda"
            self._host = torch.zeros(len(self._slots), SLOT // 8, dtype=torch.int64, pin_memory=pinned)
            self._seeds = np.array([seed for seed, _ in self._slots], np.uint64)
            self._signs = torch.tensor([signs for _, signs in self._slots])
            lengths = np.array([len(self._parts[seed]) for seed, _ in self._slots])
            self._groups = [
                (rows, np.array([self._parts[int(seed)] for seed in self._seeds[rows]], np.uint64).T)
                for rows in (np.nonzero(lengths == length)[0] for length in np.unique(lengths))
            ]
        now = np.empty_like(self._seeds)
        for rows, (first, *others) in self._groups:
            now[rows] = derive_seed(first, step, *others)
        self._host[:, 0] = torch.from_numpy((now - self._seeds).view(np.int64))
        if self._signs.any():
            was, new = (torch.from_numpy(seeds.view(np.int64))[self._signs] for seeds in (self._seeds, now))
            self._host[self._signs] = (_sign_words(was) ^ _sign_words(new)).to(torch.int32).view(torch.int64)
        for chunk, values in zip(self._chunks, self._host.split(CHUNK), strict=False):
            chunk[: len(values)].copy_(values, non_blocking=True)


_capture: CapturedSeeds | None = None


def capture() -> CapturedSeeds | None:
    """Return the seeds of the step that is being captured; None if none is."""
    return _capture


def step_seed(seed: int, step: int, *parts: int) -> int:
    """Derive the seed of one use of randomness in a training step; while a step is captured, record it for replays."""
    derived = derive_seed(seed, step, *parts)
    if _capture is not None:
        _capture._parts[derived] = (seed, *parts)
    return derived


def _sign_words(seeds: Tensor) -> Tensor:
    """Return the four words of signs that are drawn from each seed, as `sign_words` of backends/constants.py."""
    none = torch.zeros_like(seeds)
    return philox4x32((none, none, none + SIGNS, none), (seeds & 0xFFFFFFFF, seeds >> 32 & 0xFFFFFFFF))
