"""Capture the forward and backward passes of a training step in a CUDA graph, and replay it in later steps.

A step launches thousands of small kernels, and a GPU waits for the host between them. A replay of a graph launches all
of them at once. It computes what an uncaptured step computes, to the bit:

- Inputs are copied to the memory that the captured kernels read.
- The seeds of noise and rounding change with the step (fewbits.kernels.replays).
- Weights are cast and quantized within the graph, in the step's first micro-batch.
- Gradients, and the observer's statistics of mixtures, are in memory that all replays write to.

The first step runs as usual, which loads the kernels; the second is captured. A step in which the observer also
measures plain quantizers or gradients launches further kernels, so it runs as usual. After the recipe's switch, a step
is captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fewbits.experiments import devices
from fewbits.experiments.trial import Runtime, Trial
from fewbits.kernels.replays import CapturedSeeds
from fewbits.models.quantize import Quantization
from fewbits.models.runtime import invalidate_caches

Batch = tuple[Tensor, Tensor]  # inputs and targets of a micro-batch
Compute = Callable[[Iterable[Batch]], dict[str, Tensor]]


def complaint(trial: Trial, device: torch.device, ranks: int) -> str | None:
    """Return what prevents the capture of this trial's steps, or None if they can be captured."""
    reasons = {
        "needs a GPU": device.type != "cuda",
        "needs one rank": ranks > 1,
        "needs training.compile=false": trial.training.compile,
        "needs a model without experts": trial.model.experts > 0,
        "needs model.dropout=0": trial.model.dropout > 0,
        "needs a loss scale that does not change (precision.loss_scaling none or static)": (
            trial.precision.loss_scaling == "dynamic"
        ),
        "needs precision.every=0": trial.precision.every > 0,
        "needs a recipe without delayed scales": bool(trial.recipe.delayed.slots),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def captured_step(
    trial: Trial, runtime: Runtime, world: devices.World, quantization: Quantization, parameters: Iterable[Tensor]
) -> CapturedStep | None:
    """Return the object that captures and replays steps, or None if `runtime.cuda_graph` or the trial rules it out."""
    reason = complaint(trial, world.device, world.ranks)
    if runtime.cuda_graph == "off" or (runtime.cuda_graph == "auto" and reason):
        return None
    if reason:
        raise ValueError(f"runtime.cuda_graph on: {reason}; auto captures steps only where that is possible")
    return CapturedStep(quantization, [parameter for parameter in parameters if parameter.requires_grad], world.device)


class CapturedStep:
    """Runs the forward and backward passes of each step of one trial: as usual, captured, or as a replay."""

    def __init__(self, quantization: Quantization, parameters: Sequence[Tensor], device: torch.device) -> None:
        self._quantization, self._parameters, self._device = quantization, parameters, device
        self._switched: bool | None = None  # whether the last step came after the recipe's switch; None: no step yet
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, step: int, switched: bool, batches: Iterable[Batch], compute: Compute) -> dict[str, Tensor]:
        """Compute the gradients of a step; return the scalars that `compute` returns, on the device.

        step: the number on which the seeds depend. switched: the recipe's switch has happened. batches: the step's
        micro-batches, on the host. compute: computes the gradients from micro-batches on the device; it must not wait
        for the device. All gradients must be None before.
        """
        observer = self._quantization.observer
        if observer is not None and (observer.watches(step) or observer.watches_gradients(step)):
            return compute(self._copied(batches))
        if switched != self._switched:
            self._switched, self._graph = switched, None
            self._earlier = CapturedSeeds(self._device)
            with self._earlier.captured():  # so that the kernels that a replay needs are loaded
                return compute(self._copied(batches))
        if self._graph is None:
            self._capture(list(self._copied(batches)), compute)
        else:
            for own, batch in zip(self._batches, batches, strict=True):
                for to, values in zip(own, batch, strict=True):
                    devices.copy(values, to)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._seeds.set_step(step)
        assert self._graph is not None
        self._graph.replay()
        return self._scalars

    def _capture(self, batches: list[Batch], compute: Compute) -> None:
        observer = self._quantization.observer
        if observer is not None:
            observer.flush()  # observations of earlier steps are not part of the graph
        invalidate_caches()  # an evaluation may have quantized the weights of this step
        self._batches, graph = batches, torch.cuda.CUDAGraph()
        self._seeds = CapturedSeeds(self._device, self._earlier)
        with self._seeds.captured(), torch.cuda.graph(graph):
            self._scalars = compute(batches)
            if observer is not None:
                observer.flush()
        self._graph, self._gradients = graph, [parameter.grad for parameter in self._parameters]

    def _copied(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        return (
            (devices.copy(inputs, self._device), devices.copy(targets, self._device)) for inputs, targets in batches
        )
