"""Measure how much one optimizer update with a given gradient decreases the unquantized model's loss.

The weights are those of a checkpoint. The update is made as the trial that wrote the checkpoint (the parent) would make
its next one: with the checkpoint's optimizer state, and with the parent's gradient clipping and learning rate.
Afterwards the weights are restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fewbits.experiments.optimization.optimizers import (
    clip_gradients,
    load_optimizer_state,
    make_optimizer,
    set_learning_rate,
)
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.storage.checkpoints import Checkpoint, unflatten
from fewbits.experiments.trial import Trial
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.partition import adam_mini_partition
from fewbits.models.networks.registry import on_meta

OPTIMIZER = "optimizer."


class UpdateEffect:
    """The next optimizer update of the checkpoint's trial, which `applied` applies to the weights and then undoes."""

    def __init__(self, parent: Trial, checkpoint: Checkpoint, model: Decoder) -> None:
        """Read the optimizer's state from the checkpoint.

        parent: the trial that wrote the checkpoint. model: the unquantized model, with the checkpoint's weights.
        """
        self._parent, self._model = parent, model
        device = next(model.parameters()).device
        states = unflatten(checkpoint.tensors(device, under=OPTIMIZER), checkpoint.state["optimizer"])
        self._states = {name: state for name, state in states.items() if not name.endswith(".bit_scale")}
        self._partition = adam_mini_partition(on_meta(parent.model))
        self._step = min(checkpoint.step, parent.training.steps - 1)

    @property
    def known(self) -> bool:
        """True if the checkpoint has an optimizer state; a checkpoint of an imported model has none."""
        return bool(self._states)

    @contextmanager
    def applied(self, gradients: Mapping[str, Tensor]) -> Iterator[None]:
        """Update the weights with these gradients (by parameter name); restore the weights after the `with` block."""
        parent, parameters = self._parent, dict(self._model.named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        optimizer = make_optimizer(self._model, parent.optimizer, partition=self._partition)
        load_optimizer_state(optimizer, self._states)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].to(parameter.dtype, copy=True)
        clip_gradients(parameters.values(), parent.optimizer.clip)
        set_learning_rate(optimizer, factor(parent.schedule, self._step, parent.training.steps))
        try:
            optimizer.step()
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.grad = None
                    parameter.copy_(before[name])

    def loss(self, inputs: Tensor, targets: Tensor) -> float:
        """Return the loss of the unquantized model with its current weights."""
        with torch.no_grad():
            return float(self._model.loss(inputs, targets))
