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

from fewbits.kernels import ops  # noqa: F401, registers the operators
from fewbits.kernels.backends.protocol import (
    ABSENT,
    BINS,
    CAPPED,
    CHOICES,
    ERRORS,
    FLUSHED,
    LARGEST,
    LOST,
    MEAN_ONE,
    NONZEROS,
    OBSERVED,
    OBSERVED_AT_ONCE,
    SATURATED,
)
from fewbits.models.networks.partition import whole
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import SLOTS

TIERS = (5, 9, 12)  # GaussWS Fig. 5: the largest bit widths at which FP8, BF16 and FP16 represent a sampled weight


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
        self._pending: list[tuple[int, Tensor, Tensor]] = []  # rows of the table, counts, and choices or ABSENT
        # On the device of the observations; cleared in place, because CUDA graphs write to them.
        self._table: Tensor | None = None  # a row for each `_key`; Backend.observe describes the columns
        self._gradient: Tensor | None = None  # per layer: the number of measurements, the sums of error and of cosine

    def _clear(self) -> None:
        self._pending.clear()
        for statistics in (self._table, self._gradient):
            if statistics is not None:
                statistics.zero_()

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
        row = _key(layer, SLOTS.index(slot), switched)
        self._pending.append((row, counts, ABSENT if choice is None else choice))
        if len(self._pending) >= OBSERVED_AT_ONCE:
            self.flush()

    def record_weight_gradient(self, layer: int, quantized: Tensor, exact: Tensor) -> None:
        """Record the error of a weight gradient from quantized operands: its relative norm, and the cosine."""
        q, e = quantized.float(), exact.float()
        norm = torch.linalg.vector_norm(e)
        error = torch.linalg.vector_norm(q - e) / norm
        cosine = torch.nn.functional.cosine_similarity(q.flatten(), e.flatten(), dim=0)
        measured = torch.stack((torch.ones_like(error), error, cosine.clamp(-1, 1)))  # rounding may exceed ±1
        _, table = self._tables(e.device)
        table[layer] += torch.where(norm == 0, 0, measured)  # an exact gradient of 0 is not counted

    def flush(self) -> None:
        """Add the observations that calls of `record` have left in `_pending` to the table, on the device."""
        if self._pending:
            rows, counts, choices = map(list, zip(*self._pending, strict=True))
            table, _ = self._tables(counts[0].device)
            torch.ops.fewbits.observe(table, counts, choices, rows)
            self._pending.clear()

    def _tables(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Return `_table` and `_gradient`; on this device, to which they are moved, unless it is None."""
        if self._table is None or self._gradient is None:
            keys = self.layers * len(SLOTS) * 2  # 2: before and after the recipe's switch
            self._table = torch.zeros(keys, OBSERVED, dtype=torch.int64, device=device)
            self._gradient = torch.zeros(self.layers, 3, dtype=torch.float64, device=device)
        if device is not None and self._table.device != device:
            self._table, self._gradient = self._table.to(device), self._gradient.to(device)
        return self._table, self._gradient

    def _read(self, values: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor, list[float]]:
        """Return copies of the two tables on the host, and the scalar tensors `values` as numbers.

        There is one transfer for everything, because each transfer waits for the device.
        """
        self.flush()
        table, gradient = self._tables(values[0].device if values else None)
        floats = torch.cat((gradient.flatten(), *(v.reshape(1).double() for v in values)))
        host = torch.cat((table.flatten(), floats.view(torch.int64))).cpu()
        numbers = host[table.numel() :].view(torch.float64)
        split = gradient.numel()
        return host[: table.numel()].view(table.shape), numbers[:split].view(gradient.shape), numbers[split:].tolist()

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
        table, gradient, values_read = self._read([value for values in measured for value in values.values()])
        numbers = iter(values_read)
        largest = greatest(table[:, LARGEST].contiguous())  # before `total`, which may add in place
        statistics = total(table).numpy()
        statistics[:, LARGEST] = largest.numpy()
        gradients = total(gradient).numpy()
        rows: list[dict[str, Any]] = []
        for layer, values in zip(layers, measured, strict=True):
            rows += self._slot_rows(step, layer, statistics)
            if weights:
                own = {name: next(numbers) for name in values}
                rows.append(self._weight_row(step, layer, own, gradients[layer.index]))
        self._clear()
        return rows

    def _slot_rows(self, step: int, layer: QuantizedLinear, statistics: np.ndarray) -> Iterator[dict[str, Any]]:
        for switched, plan in enumerate(layer.plans):
            for i, (name, slot) in enumerate(plan.operands.items()):
                row = statistics[_key(layer.index, i, bool(switched))]
                if row[BINS].any():
                    yield self._labels(step, layer, name) | {"quantizer": str(slot.spec)} | _columns(row)

    def _weight_row(
        self, step: int, layer: QuantizedLinear, measured: dict[str, float], gradient: np.ndarray
    ) -> dict[str, Any]:
        times, error, cosine = gradient
        row = self._labels(step, layer, "weight") | measured
        if times:
            row |= {"gradient_error": float(error / times), "gradient_cosine": float(cosine / times)}
        return row

    def _labels(self, step: int, layer: QuantizedLinear, slot: str) -> dict[str, Any]:
        return {"step": step, "layer": layer.name, "block": layer.block, "part": layer.part, "slot": slot}

    # ---- checkpoints

    def state(self) -> dict[str, Tensor]:
        table, gradient, _ = self._read()
        return {"table": table.clone(), "gradient": gradient.clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a state that `state()` returned; raise ValueError if it is of another number of layers."""
        expected, actual = ({name: tuple(values.shape) for name, values in s.items()} for s in (self.state(), state))
        if actual != expected:
            raise ValueError(
                f"the state to load into the observer has shapes {actual}, but an observer of {self.layers} layers "
                f"needs {expected}: load the state of a model with as many layers"
            )
        self._clear()
        for own, name in zip(self._tables(), ("table", "gradient"), strict=True):
            own.copy_(state[name])


def _key(layer: int, slot: int, switched: bool) -> int:
    """Return the row index, in the arrays of statistics, of a layer's slot before or after the recipe's switch."""
    return (layer * len(SLOTS) + slot) * 2 + switched


def _columns(statistics: np.ndarray) -> dict[str, Any]:
    """Return the columns of a table row from one slot's row of `Observer._table`."""
    batches = int(statistics[BINS].sum())
    nonzero = max(int(statistics[NONZEROS]), 1)
    row: dict[str, Any] = {
        "batches": batches,
        "error": float(statistics[ERRORS] / MEAN_ONE / batches),
        "error_max": float(statistics[LARGEST : LARGEST + 1].view(np.float64)[0]),
        "histogram": statistics[BINS].tolist(),
        "flushed": float(statistics[FLUSHED] / nonzero),
        "saturated": float(statistics[SATURATED] / nonzero),
        "capped": float(statistics[CAPPED] / nonzero),
        "lost": int(statistics[LOST]),
    }
    if decisions := statistics[CHOICES].sum():
        row |= {f"share_{entry}": float(n / decisions) for entry, n in enumerate(statistics[CHOICES])}
    return row


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
