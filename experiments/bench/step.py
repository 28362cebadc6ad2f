"""Run the training step that is measured (forward, backward, clipping, optimizer) and count its tensors' memory.

Memory is exact and the same on every run. On a GPU the allocator reports it. On a CPU every tensor that an operation
returns is counted from its creation until its storage is freed; temporary memory inside a kernel is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fewbits.experiments.optimization.optimizers import OptimizerConfig, clip_gradients, make_optimizer
from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.partition import adam_mini_partition
from fewbits.models.networks.registry import build
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.recipe import Recipe


@dataclass
class Step:
    """A training step of one variant, with a model of its own. Each call runs the next step."""

    model: Decoder
    quantization: Quantization | None
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    targets: Tensor
    number: int = 0

    @staticmethod
    def of(
        config: DecoderConfig, recipe: Recipe | None, optimizer: str, batch: Tensor, *, observed: bool = False
    ) -> Step:
        """Return the step of a new model; `recipe` None trains plain BF16, `observed` attaches an observer."""
        model = build(config, seed=0, device=batch.device)
        observer = Observer(ObserverConfig()) if observed else None
        quantization = None if recipe is None else quantize(model, recipe, observer=observer)
        partition = adam_mini_partition(model) if optimizer == "adam-mini" else None
        made = make_optimizer(model, OptimizerConfig(kind=optimizer), partition=partition)
        return Step(model, quantization, made, batch[:, :-1], batch[:, 1:])

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
        """Run one step and return the bytes of tensors at its peak."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [
            value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
        return peak_bytes(self, tensors, self.inputs.device)


class MemoryCounter(TorchDispatchMode):
    """A context that tracks the bytes of CPU tensors: those passed in, and those that operations return inside it.

    `now` is the current number of bytes and `peak` the largest so far.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
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
    """Run a step and return the bytes of tensors at its peak.

    tensors: what exists before the step and counts (parameters, the optimizer's state). Other memory does not count.
    """
    tensors = list(tensors)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        own = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return torch.cuda.max_memory_allocated(device) - before + sum(own.values())
    counter = MemoryCounter(tensors)
    with counter:
        step()
    return counter.peak
