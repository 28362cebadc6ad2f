"""Make what a probe trial compares: models with a checkpoint's weights, recipes in part, the next update, batches.

The models share the weights: an unquantized one is the reference, and there is one for each recipe.

Tokens of one document are not independent of each other. Therefore the documents of a held-out split are divided into
GROUPS groups, and a probe with the seed s reads only the group s mod GROUPS. Seeds with different groups have no
document in common, so the variance of results over seeds includes the variance over texts.

A variant quantizes only some slots or blocks of a model, to find which of them cause a recipe's effect: `only fprop.x`
quantizes the slot fprop.x of every layer as the recipe does, and leaves all other slots in high precision; `without
fprop.x` quantizes all slots except fprop.x. GEMMs (`only wgrad`) and blocks (`only block 3`) have such variants, too.
If the recipe rotates both operands of a GEMM (Hadamard transform) and a variant leaves one in high precision, this
operand is still rotated, but not quantized, because a product needs both operands in the same basis.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.optimization.optimizers import (
    clip_gradients,
    load_optimizer_state,
    make_optimizer,
    set_learning_rate,
)
from fewbits.experiments.optimization.precision import DTYPES
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.trial import ORDER, ROUNDING, Trial
from fewbits.kernels.quantizer import Quantizer
from fewbits.kernels.seeds import derive_seed
from fewbits.models.hooks import Spec, first_quantizer
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.partition import partition_of
from fewbits.models.networks.registry import on_meta
from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import Quantization, quantize
from fewbits.models.quantized_linear import Plan, QuantizedLinear
from fewbits.models.recipe import AXES, FIRST_SLOT, GEMMS, SLOTS, Operands, Recipe, Slot

_WIDTHS = ".bit_scale"
GROUPS = 6  # the message in `batches` says "a sixth"


@dataclass(frozen=True, eq=False)
class Bench:
    """The models that a probe makes from a checkpoint; they share the same parameter tensors."""

    trial: Trial  # the trial that wrote the checkpoint
    model: Decoder  # unquantized, in the trial's dtype; copied for each recipe
    exact: Decoder  # unquantized, in the reference's dtype
    widths: Mapping[str, Tensor]  # learned bit widths by name; empty if the trial has no sampler
    step: int  # the checkpoint's step
    origin: int  # updates that the trial's ancestors made before the trial started; 0 if it is no branch

    def quantized(self, recipe: Recipe, batch: int, seed: int) -> tuple[Decoder, Quantization]:
        """Return a model with the checkpoint's parameters, quantized by a recipe for a batch, and its Quantization.

        batch: the batch's number, from 0, by which random numbers are keyed. seed: selects the random numbers; 0: those
        that the trial itself would use next.

        The bit widths are those that the trial learned if init, target and block of the recipe's sampler equal those of
        the trial's sampler, else `sampler.init`.
        """
        t, ours, own = self.trial.training, recipe.sampler, self.trial.recipe.sampler
        model = shared_copy(self.model)
        quantization = quantize(
            model,
            recipe,
            seed=self.trial.seed_for(ROUNDING, *([seed] if seed else [])),
            observer=Observer(ObserverConfig(window=1, every=1, gradients_every=0)),
        )
        if (ours.init, ours.target, ours.block) == (own.init, own.target, own.block):
            for layer in quantization.layers:
                if layer.bit_scale is not None and (learned := self.widths.get(layer.name + _WIDTHS)) is not None:
                    layer.bit_scale.data.copy_(learned)
        update, micro_batch = divmod(batch, t.batch // t.micro_batch)
        quantization.begin(self.origin + self.step + update, micro_batch, progress=self.step / t.steps)
        return model, quantization


def draws_noise(quantization: Quantization) -> bool:
    """Tell whether a model's recipe uses random numbers at the present step, so that results depend on the seed."""
    plans = [(layer, layer.plans[quantization.context.switched]) for layer in quantization.layers]
    return any(
        layer.sampler is not None or any(pair.needs_seed for pair in (plan.x, plan.w, plan.dy)) for layer, plan in plans
    )


def make_bench(trial: Trial, checkpoint: checkpoints.Checkpoint, device: torch.device, reference: torch.dtype) -> Bench:
    """Load the model of a checkpoint. reference: the dtype in which the unquantized model, the reference, computes."""
    state = checkpoint.state
    saved = checkpoints.unflatten(checkpoint.tensors(device, under="model."), state["model"])
    widths = {name: tensor for name, tensor in saved.items() if name.endswith(_WIDTHS)}
    with torch.device(device):
        model = Decoder(trial.model, DTYPES[trial.training.dtype])
    model.load_state_dict({name: tensor for name, tensor in saved.items() if name not in widths})
    exact = shared_copy(model)
    exact.compute_dtype = reference
    return Bench(trial, model, exact, widths, state["step"], state["origin"])


def shared_copy(model: Decoder) -> Decoder:
    """Return a copy of the model whose parameters and buffers are the same tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def backward(model: Decoder, inputs: Tensor, targets: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the cross entropy without a sampler's penalty, and its gradient for every parameter except bit widths."""
    parameters = {name: p for name, p in model.named_parameters() if not name.endswith(_WIDTHS)}
    loss = model.loss(inputs, targets)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return float(loss.detach()), dict(zip(parameters, gradients, strict=True))


def layer_labels(layer: QuantizedLinear) -> dict[str, Any]:
    """Return the columns that identify a layer in tables: its name, block number and part."""
    return {"layer": layer.name, "block": layer.block, "part": layer.part}


# ------------------------------------------------------------------------------------------------ updates


class UpdateEffect:
    """The next optimizer update of the checkpoint's trial (the parent), which `applied` makes and then undoes.

    It is made with the checkpoint's optimizer state, and with the parent's gradient clipping and learning rate.
    """

    def __init__(self, parent: Trial, checkpoint: checkpoints.Checkpoint, model: Decoder) -> None:
        """Read the optimizer's state from a checkpoint of `parent`. model: unquantized, with the weights."""
        self._parent, self._model = parent, model
        device = next(model.parameters()).device
        states = checkpoints.unflatten(checkpoint.tensors(device, under="optimizer."), checkpoint.state["optimizer"])
        self._states = {name: state for name, state in states.items() if not name.endswith(_WIDTHS)}
        self._partition = partition_of(on_meta(parent.model), parent.optimizer.kind)
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


# ------------------------------------------------------------------------------------------------ batches


def batches(corpus: Corpus, trial: Trial, parent: Trial, position: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of each batch of a probe trial: int64 [training.micro_batch, training.length].

    parent: the trial whose checkpoint is probed. position: the number of sequences that it had read by then; the
    batches of the split `train` begin there. Raise ValueError if the seed's group of documents has too little text.
    """
    t = trial.training
    if trial.probe.split == "train":
        text, first_step = corpus.phase_at(position // parent.training.batch, parent.training.steps)
        position -= first_step * parent.training.batch
        for batch in range(t.steps):
            first = position + batch * t.micro_batch
            yield text.batch("train", first, t.micro_batch, t.length, parent.seed_for(ORDER))
        return
    windows = _windows(_documents(corpus, trial.probe.split, t.length)[trial.seed % GROUPS :: GROUPS], t.length)
    count = t.steps * t.micro_batch
    if len(windows) < count:
        raise ValueError(
            f"training.steps {t.steps}: the probe needs {count} windows of {t.length} tokens, but a sixth of the "
            f"documents of split {trial.probe.split}, which each seed reads, has only {len(windows)}: reduce steps, "
            "training.micro_batch or training.length"
        )
    for first in range(0, count, t.micro_batch):
        rows = torch.from_numpy(np.stack(windows[first : first + t.micro_batch]).astype(np.int64))
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _documents(corpus: Corpus, split: str, length: int) -> list[np.ndarray]:
    """Return the documents with more than `length` tokens, in a pseudorandom order that is the same for all seeds."""
    if corpus.folder.meta.separator is None:  # no documents are known: every window is a document, as in evaluations
        inputs, targets = corpus.windows(split, (corpus.tokens_in(split) - 1) // length, length)
        found = list(torch.cat((inputs, targets[:, -1:]), 1).numpy())
    else:
        found = [np.asarray(tokens) for tokens in corpus.documents(split) if len(tokens) > length]
    return [found[number] for number in sorted(range(len(found)), key=lambda number: derive_seed(0, number))]


def _windows(documents: list[np.ndarray], length: int) -> list[np.ndarray]:
    """Return windows of length + 1 tokens: the first window of each document, then the second of each, and so on."""
    longest = max(map(len, documents), default=0)
    return [
        tokens[begin : begin + length + 1]
        for begin in range(0, longest - length, length)
        for tokens in documents
        if begin + length < len(tokens)
    ]


# ------------------------------------------------------------------------------------------------ variants

ALL = "all"  # the name of the variant that is the recipe itself


@dataclass(frozen=True)
class Variant:
    """A variant of a recipe, which quantizes only some slots or only some blocks of a model."""

    name: str
    slots: frozenset[str] = frozenset(SLOTS)
    blocks: frozenset[int] | None = None  # block numbers; None: all blocks

    def apply(self, quantization: Quantization) -> None:
        """Change a quantized model so that only this variant's slots and blocks are quantized."""
        plans: dict[tuple[int, bool], tuple[Plan, Plan]] = {}
        for layer in quantization.layers:
            quantizes = self.blocks is None or layer.block in self.blocks
            key = (id(layer.plans), quantizes)
            if key not in plans:
                slots = self.slots if quantizes else frozenset()
                before, after = (_restricted(plan, slots) for plan in layer.plans)
                plans[key] = before, after
            layer.use(*plans[key])


def variants(parts: Sequence[str], quantization: Quantization) -> Iterator[Variant]:
    """Yield the variants `only X` and `without X` for each GEMM, slot or block X that the recipe quantizes.

    parts: which X to vary, any of `gemms`, `slots` and `blocks`. Two slots for which the recipe quantizes a tensor only
    once are varied together, under the name of the first.
    """
    layers = [layer for layer in quantization.layers if _quantizes(layer)]
    used = {slot for layer in layers for plan in layer.plans for slot, its in plan.operands.items() if its.spec}
    if "gemms" in parts:
        for gemm in GEMMS:
            slots = frozenset(slot for slot in SLOTS if slot.startswith(f"{gemm}."))
            if slots & used:
                yield from _both(gemm, slots)
    if "slots" in parts:
        for slot in SLOTS:
            first = FIRST_SLOT.get(slot)
            if slot in used and not (first and _always_equal(layers, first, slot)):
                second = next((other for other, its in FIRST_SLOT.items() if its == slot), None)
                joined = second is not None and _always_equal(layers, slot, second)
                yield from _both(slot, frozenset({slot, second} if joined and second else {slot}))
    if "blocks" in parts:
        blocks = sorted({layer.block for layer in layers})
        for block in blocks if len(blocks) > 1 else ():
            yield Variant(f"only block {block}", blocks=frozenset({block}))
            yield Variant(f"without block {block}", blocks=frozenset(blocks) - {block})


def _restricted(plan: Plan, slots: frozenset[str]) -> Plan:
    """Return the plan of a layer with only these slots quantized; incomplete GEMMs are not executed in FP8."""
    executed = frozenset(gemm for gemm in plan.executed if slots.issuperset(_slots(gemm)))
    return Plan(restricted(plan.operands, slots), executed)


def restricted(operands: Operands, slots: frozenset[str]) -> Operands:
    """Return the operands of a layer with only these slots quantized; others are rotated if the GEMM's other one is."""
    quantized = {gemm: any(slot in slots and operands[slot].spec for slot in _slots(gemm)) for gemm in GEMMS}
    return {
        slot: its if slot in slots or its.spec is None else _high(slot, its.spec, rotated=quantized[_gemm(slot)])
        for slot, its in operands.items()
    }


def _both(name: str, slots: frozenset[str]) -> Iterator[Variant]:
    """Yield the variant `only NAME`, which quantizes only these slots, and `without NAME`, which quantizes the rest."""
    yield Variant(f"only {name}", slots)
    yield Variant(f"without {name}", frozenset(SLOTS) - slots)


def _high(slot: str, spec: Spec, *, rotated: bool) -> Slot:
    """Return the Slot in high precision that replaces one with the quantizers `spec`. rotated: keep its rotation."""
    quantizer = first_quantizer(spec)
    if not (rotated and quantizer.hadamard):
        return Slot(None, AXES[slot])
    signs = "" if quantizer.signs is None else f":signs={quantizer.signs}"
    return Slot(Quantizer.parse(f"fp32:rht{quantizer.hadamard}{signs}"), AXES[slot])


def _quantizes(layer: QuantizedLinear) -> bool:
    return any(slot.spec for plan in layer.plans for slot in plan.operands.values())


def _always_equal(layers: Sequence[QuantizedLinear], first: str, second: str) -> bool:
    """Tell whether two slots of the same tensor quantize it equally in all layers, also after a `switch`."""
    return all(plan.operands[first].equals(plan.operands[second]) for layer in layers for plan in layer.plans)


def _slots(gemm: str) -> list[str]:
    return [slot for slot in SLOTS if _gemm(slot) == gemm]


def _gemm(slot: str) -> str:
    return slot.partition(".")[0]
