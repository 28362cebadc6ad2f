"""Measure the effects of quantization during training, by layer: relative errors, choices, flushed values, bit widths.

The observer collects statistics over a window of steps. At the end of the window it returns one row for each layer and
slot, and one row for each layer's weight. If the recipe switches within the window, a slot has two rows: one for its
quantizer before the switch and one for its quantizer after it. Statistics of mixtures are recorded for every
micro-batch, because a mixture computes errors anyway. Statistics of plain quantizers and errors of weight gradients
take extra time, so the statistics are measured only every `every` steps, and the errors only every `gradients_every`
steps. During the window all values stay on the device, and at the window's end one copy brings them to the host, so
that a training step does not wait for the device.

If several ranks train a model, each observes its own micro-batches, and the window's statistics are summed over ranks
at the window's end. Counts and sums of errors are integers, so the sums are the same for any number of ranks.

The errors of a mixture are the errors of its first quantizer in all blocks, whatever the mixture then chooses;
`share_i` is the share of blocks (decisions) for which the mixture chose its i-th quantizer, counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.kernels.backends.protocol import COUNTS
from fewbits.models.networks.sharded import whole
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import SLOTS

ERROR_ONE = 1 << 23  # kernels count a relative error e as the whole number e · 2²³
MEAN_ONE = 1 << 40  # the mean error e of a micro-batch is summed as the whole number e · 2⁴⁰
# The bounds of the histogram's bins. It counts micro-batches by their mean relative error. MoR's bins are unknown.
BINS = np.append(np.arange(0, 0.1001, 0.005), np.inf)
ENTRIES = 4  # counts of a mixture's choices: one per quantizer; the last includes all further quantizers
PENDING = 512  # how many observations are kept as separate tensors before `_compact` stacks them in one tensor
TIERS = (5, 9, 12)  # GaussWS Fig. 5: the largest bit widths at which FP8, BF16 and FP16 represent a sampled weight

# The columns of the counts that the kernels return (arithmetic.md).
_ERROR, _NONZERO, _FLUSHED, _SATURATED, _CAPPED, _NONFINITE, _LOST = range(COUNTS)


@dataclass(frozen=True)
class ObserverConfig:
    enabled: bool = True
    window: int = 50  # steps after which rows are returned (MoR resets its histograms every 6000 steps)
    every: int = 10  # steps between measurements of plain quantizers; 0: never
    gradients_every: int = 50  # steps between measurements of the weight gradients' error; 0: never


class Observer:
    """Collects the statistics that the quantized layers of one model report (see the module's docstring)."""

    def __init__(self, config: ObserverConfig) -> None:
        for name, minimum in (("window", 1), ("every", 0), ("gradients_every", 0)):
            if getattr(config, name) < minimum:
                valid = "1 or more" if minimum else "0 (never) or more"
                raise ValueError(f"observer.{name} {getattr(config, name)!r}: expected a number of steps, {valid}")
        self.config = config
        self.layers = 0

    def bind(self, layers: int) -> None:
        """Set the number of layers to observe, and discard all statistics."""
        self.layers = layers
        self._pending: list[tuple[int, Tensor, Tensor | None]] = []
        self._compacted: list[Tensor] = []  # each row: the counts and the choices of one observation
        self._keys: list[int] = []  # the key (`_key`) of each row of `_compacted`
        self._gradients: list[tuple[int, Tensor]] = []
        self._clear()

    def _clear(self) -> None:
        keys = self.layers * len(SLOTS) * 2  # 2: before and after the recipe's switch
        self._histogram = np.zeros((keys, len(BINS) - 1), np.int64)
        self._counts = np.zeros((keys, COUNTS), np.int64)
        self._errors = np.zeros(keys, np.int64)  # sums of the mean errors of micro-batches
        self._largest = np.zeros(keys)  # their maxima
        self._choices = np.zeros((keys, ENTRIES), np.int64)
        self._gradient = np.zeros((self.layers, 3))  # columns: number of measurements; sums of error and of cosine

    # ---- called by the layers

    def watches(self, step: int) -> bool:
        """Tell whether the statistics of plain quantizers (slots without a mixture) are measured in this step."""
        return self.config.every > 0 and step % self.config.every == 0

    def watches_gradients(self, step: int) -> bool:
        """Tell whether the errors of the weight gradients are measured in this step."""
        return self.config.gradients_every > 0 and step % self.config.gradients_every == 0

    def record(self, layer: int, slot: str, counts: Tensor, choice: Tensor | None, *, switched: bool = False) -> None:
        """Record the statistics of one quantization of an operand.

        layer: the layer's index. counts: the kernel's seven counts, such as the number of flushed values, of the tensor
        or of each block (arithmetic.md, Statistics). choice: the index of the quantizer that a mixture chose for
        each block; None for a plain quantizer. switched: True if the recipe's `switch` has changed the quantizers.
        """
        self._pending.append((_key(layer, SLOTS.index(slot), switched), counts, choice))
        if len(self._pending) >= PENDING:
            self._compact()

    def record_weight_gradient(self, layer: int, quantized: Tensor, exact: Tensor) -> None:
        """Record the relative error of a layer's weight gradient, and its cosine similarity with the exact gradient.

        quantized, exact: the gradient from quantized and from unquantized operands.
        """
        q, e = quantized.float(), exact.float()
        norm = torch.linalg.vector_norm(e)
        error = torch.linalg.vector_norm(q - e) / norm
        cosine = torch.nn.functional.cosine_similarity(q.flatten(), e.flatten(), dim=0)
        measured = torch.stack((torch.ones_like(error), error, cosine.clamp(-1, 1)))  # rounding may exceed ±1
        self._gradients.append((layer, torch.where(norm == 0, 0, measured)))  # an exact gradient of 0 is not counted

    def _compact(self) -> None:
        """Replace the separate tensors that calls of `record` have left in `_pending` by one tensor in `_compacted`.

        The tensor stays on the device. It has a row for each call: the seven counts, summed over blocks, and how often
        the mixture chose each of its quantizers (zeros for a plain quantizer).
        """
        if not self._pending:
            return
        counts = torch.stack([counts.reshape(-1, COUNTS).sum(0) for _, counts, _ in self._pending])
        none = counts.new_zeros(ENTRIES)
        entries = torch.arange(ENTRIES, device=counts.device)
        choices = [none if choice is None else _count_choices(choice, entries) for _, _, choice in self._pending]
        self._keys += [key for key, _, _ in self._pending]
        self._compacted.append(torch.cat((counts, torch.stack(choices)), 1))
        self._pending = []

    def settle(self, values: Sequence[Tensor] = ()) -> list[float]:
        """Add all recorded observations to the statistics of the window, and return `values` as numbers.

        Observations are recorded by `record` and `record_weight_gradient`. values: other scalar tensors, which are
        copied from the device in the same transfer as the observations, because each transfer waits for the device.
        """
        self._compact()
        gradients = [values for _, values in self._gradients]
        floats = torch.cat([v.reshape(-1).double() for v in (*gradients, *values)]) if gradients or values else None
        integers = [rows.flatten() for rows in self._compacted]
        everything = [*integers, *([] if floats is None else [floats.view(torch.int64)])]
        if not everything:
            return []
        host = torch.cat(everything).cpu()
        split = len(self._keys) * (COUNTS + ENTRIES)
        rows, numbers = host[:split].view(-1, COUNTS + ENTRIES).numpy(), host[split:].view(torch.float64).numpy()
        self._add(np.array(self._keys, np.int64), rows[:, :COUNTS], rows[:, COUNTS:])
        for (layer, _), measured in zip(self._gradients, numbers[: 3 * len(gradients)].reshape(-1, 3), strict=True):
            self._gradient[layer] += measured
        self._compacted, self._keys, self._gradients = [], [], []
        scalars: list[float] = numbers[3 * len(gradients) :].tolist()
        return scalars

    def _add(self, keys: np.ndarray, counts: np.ndarray, choices: np.ndarray) -> None:
        """Add observations to the statistics of the window.

        Observation i is keys[i] (the result of `_key`), the row counts[i], and the row choices[i], which says how often
        a mixture chose each of its quantizers.
        """
        errors = counts[:, _ERROR] / ERROR_ONE / np.maximum(counts[:, _NONZERO], 1)
        np.add.at(self._counts, keys, counts)
        np.add.at(self._choices, keys, choices)
        np.add.at(self._histogram, (keys, np.searchsorted(BINS, errors, side="right") - 1), 1)
        np.add.at(self._errors, keys, np.rint(errors * MEAN_ONE).astype(np.int64))
        np.maximum.at(self._largest, keys, errors)

    # ---- results

    def due(self, step: int) -> bool:
        """Tell whether this step is the last of a window."""
        return (step + 1) % self.config.window == 0

    def rows(
        self,
        step: int,
        layers: Sequence[QuantizedLinear],
        *,
        weights: bool = True,
        total: Callable[[Tensor], Tensor] = lambda x: x,
        greatest: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> list[dict[str, Any]]:
        """Return the statistics of the window that ends with `step` as table rows, and start the next window.

        Call this method before the gradients of `step` are cleared. weights=False omits the rows of the weights; to get
        these rows, all ranks of a sharded model must call this method, because it gathers the weights.
        total, greatest: return the sum and the maximum of a tensor over all ranks, which must all call this method.
        """
        measured = [_measure_weight(layer) if weights else {} for layer in layers]
        numbers = iter(self.settle([value for values in measured for value in values.values()]))
        for name in ("histogram", "counts", "errors", "choices", "gradient"):
            setattr(self, f"_{name}", total(torch.from_numpy(getattr(self, f"_{name}"))).numpy())
        self._largest = greatest(torch.from_numpy(self._largest)).numpy()
        rows: list[dict[str, Any]] = []
        for layer, values in zip(layers, measured, strict=True):
            rows += self._slot_rows(step, layer)
            rows += [self._weight_row(step, layer, {name: next(numbers) for name in values})] if weights else []
        self._clear()
        return rows

    def _slot_rows(self, step: int, layer: QuantizedLinear) -> Iterator[dict[str, Any]]:
        for switched, plan in enumerate(layer.plans):
            for i, (name, slot) in enumerate(plan.operands.items()):
                key = _key(layer.index, i, bool(switched))
                if self._histogram[key].any():
                    yield self._labels(step, layer, name) | {"quantizer": str(slot.spec)} | self._statistics(key)

    def _statistics(self, key: int) -> dict[str, Any]:
        batches = int(self._histogram[key].sum())
        nonzero = max(int(self._counts[key, _NONZERO]), 1)
        row: dict[str, Any] = {
            "batches": batches,
            "error": float(self._errors[key] / MEAN_ONE / batches),
            "error_max": float(self._largest[key]),
            "histogram": self._histogram[key].tolist(),
            "flushed": float(self._counts[key, _FLUSHED] / nonzero),
            "saturated": float(self._counts[key, _SATURATED] / nonzero),
            "capped": float(self._counts[key, _CAPPED] / nonzero),
            "lost": int(self._counts[key, _LOST]),
        }
        if decisions := self._choices[key].sum():
            row |= {f"share_{entry}": float(n / decisions) for entry, n in enumerate(self._choices[key])}
        return row

    def _weight_row(self, step: int, layer: QuantizedLinear, measured: dict[str, float]) -> dict[str, Any]:
        times, error, cosine = self._gradient[layer.index]
        row = self._labels(step, layer, "weight") | measured
        if times:
            row |= {"gradient_error": float(error / times), "gradient_cosine": float(cosine / times)}
        return row

    def _labels(self, step: int, layer: QuantizedLinear, slot: str) -> dict[str, Any]:
        return {"step": step, "layer": layer.name, "block": layer.block, "part": layer.part, "slot": slot}

    # ---- checkpoints

    def state(self) -> dict[str, Tensor]:
        self.settle()
        arrays = ("histogram", "counts", "errors", "largest", "choices", "gradient")
        return {name: torch.from_numpy(getattr(self, f"_{name}").copy()) for name in arrays}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a state that `state()` returned; raise ValueError if it is of another number of layers."""
        expected, actual = ({name: tuple(values.shape) for name, values in s.items()} for s in (self.state(), state))
        if actual != expected:
            raise ValueError(
                f"the state to load into the observer has shapes {actual}, but an observer of {self.layers} layers "
                f"needs {expected}: load the state of a model with as many layers"
            )
        for name, values in state.items():
            setattr(self, f"_{name}", values.numpy().copy())


def _key(layer: int, slot: int, switched: bool) -> int:
    """Return the row index, in the arrays of statistics, of a layer's slot before or after the recipe's switch."""
    return (layer * len(SLOTS) + slot) * 2 + switched


def _count_choices(choice: Tensor, entries: Tensor) -> Tensor:
    """Return for how many blocks a mixture chose each quantizer; the last count includes all further quantizers.

    choice: the index of the quantizer that the mixture chose for each block. entries: the indices 0 … ENTRIES − 1.
    torch.bincount is not used, because it makes the host wait for the device.
    """
    return (choice.reshape(-1, 1).clamp(max=ENTRIES - 1) == entries).sum(0)


def _measure_weight(layer: QuantizedLinear) -> dict[str, Tensor]:
    """Return scalars on the device, by column name: the norms of a weight and its gradient, statistics of bit widths.

    `bits_to_T` is the share of the learned bit widths that are at most T.
    """
    measured = {"weight_norm": whole(layer.matrix.detach()).norm()}
    if (gradient := layer.gradient) is not None:
        measured["gradient_norm"] = whole(gradient).norm()
    if (bits := layer.bits) is not None:
        bits = whole(bits.detach())
        measured |= {"bits_mean": bits.mean(), "bits_std": bits.std(correction=0)}
        measured |= {"bits_min": bits.min(), "bits_max": bits.max()}
        measured |= {f"bits_to_{tier}": (bits <= tier).double().mean() for tier in TIERS}
    return measured
