"""Run the training step that is timed (forward, backward, clipping, optimizer), and count the memory of its tensors.

The number of bytes is the same each time the step runs. On a GPU the allocator reports it. On a CPU every tensor that
an operation returns is counted from its creation until its storage is freed; temporary memory inside a kernel is not
counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fewbits.experiments.optimization.optimizers import OptimizerConfig, clip_gradients, make_optimizer
from fewbits.models.networks.decoder import DecoderConfig
from fewbits.models.networks.partition import adam_mini_partition
from fewbits.models.networks.registry import build
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.recipe import Recipe


class Step:
    """A model that is trained with a recipe or in plain BF16, always on the same batch; each call runs one step."""

    def __init__(
        self, config: DecoderConfig, recipe: Recipe | None, optimizer: str, batch: Tensor, *, observed: bool = False
    ) -> None:
        """Build the model. batch: tokens [sequences, length + 1].

        recipe: None for plain BF16. optimizer: adamw or adam-mini. observed: attach an observer to the quantizers.
        """
        self.model = build(config, seed=0, device=batch.device)
        self.quantization: Quantization | None = None
        if recipe is not None:
            self.quantization = quantize(self.model, recipe, observer=Observer(ObserverConfig()) if observed else None)
        partition = adam_mini_partition(self.model) if optimizer == "adam-mini" else None
        self.optimizer = make_optimizer(self.model, OptimizerConfig(kind=optimizer), partition=partition)
        self.inputs, self.targets = batch[:, :-1], batch[:, 1:]
        self.number = 0

    def __call__(self) -> None:
        quantization = self.quantization
        if quantization is not None:
            quantization.begin(self.number)
        loss = self.model.loss(self.inputs, self.targets)
        if quantization is not None and (penalty := quantization.penalty()) is not None:
            loss = loss + penalty
        loss.backward()
        clip_gradients(self.model.parameters(), 1.0)
        if quantization is not None and quantization.observer is not None and quantization.observer.due(self.number):
            quantization.observer.rows(self.number, quantization.layers)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.number += 1

    def memory(self) -> int:
        """Run one step; return the peak number of bytes of all tensors, including parameters and optimizer states."""
        state = tree_leaves([*self.optimizer.state.values()])
        tensors = [*self.model.parameters(), *self.model.buffers(), *filter(torch.is_tensor, state)]
        return peak_bytes(self, tensors, self.inputs.device)


class MemoryCounter(TorchDispatchMode):
    """Count the bytes of `tensors` and of all tensors that operations return inside a `with` block of this object.

    The attribute `now` is the number of bytes at present, and `peak` the largest number so far.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def peak_bytes(step: Callable[[], None], tensors: Iterable[Tensor], device: torch.device) -> int:
    """Run a step; return the peak of the total bytes of all tensors that exist at the same time.

    tensors: tensors that exist before the step and are counted too (parameters, the optimizer's state).
    """
    counter = MemoryCounter(tensors)
    if device.type != "cuda":
        with counter:
            step()
        return counter.peak
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + counter.now
