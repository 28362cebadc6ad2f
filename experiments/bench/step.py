"""A training step that is measured: forward, backward, clipping and optimizer, and the memory that its tensors take.

Memory is exact and the same on every run. On a GPU the allocator knows it. On a CPU every tensor that an operation
returns is counted from when its storage is made until it is let go of; what a kernel uses inside is not seen.
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
    """One variant's training: a model of its own, called for one step after another."""

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
        """Bytes of tensors at the peak of the next step."""
        held = [*self.model.parameters(), *self.model.buffers()]
        held += [value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        return peak_bytes(self, held, self.inputs.device)


class Counted(TorchDispatchMode):
    """Within: `now` and `peak` are the bytes of tensors on the CPU that were given, or made by operations since."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()
        for tensor in given:
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


def peak_bytes(step: Callable[[], None], held: Iterable[Tensor], device: torch.device) -> int:
    """Of a step, what is held before it (parameters, the optimizer's state) included, and what others hold left out."""
    held = list(held)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        own = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held}
        return torch.cuda.max_memory_allocated(device) - before + sum(own.values())
    counted = Counted(held)
    with counted:
        step()
    return counted.peak
