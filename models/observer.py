"""Measure the effects of quantization during training, by layer: relative errors, choices, flushed values, bit widths.

The observer collects statistics over a window of steps and then returns rows: one for each layer and slot, and one for
each layer's weight. If the recipe switches within the window, a slot has two rows, one for each of its quantizers. The
statistics of mixtures are recorded for every micro-batch, because mixtures compute the error anyway. Those of plain
quantizers, and the error of the weight gradient, cost extra time and are measured only at some steps. The values stay
on the device until `settle` reads them.

The errors of a mixture are those of its first entry, before the decision; `share_i` is the share of decisions for entry
i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbits.kernels.counts import COUNTS
from fewbits.models.networks.sharded import whole
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import SLOTS

ERROR_ONE = 1 << 23
# Bins of the mean relative error of a micro-batch; MoR's bins are unknown.
BINS = np.append(np.arange(0, 0.1001, 0.005), np.inf)
ENTRIES = 4  # entries of a mixture that are counted separately; further entries count as the last of these
PENDING = 512  # the number of observations that are kept on the device before they are read
TIERS = (5, 9, 12)  # GaussWS Fig. 5: the largest bit widths for which FP8, BF16 and FP16 hold a sampled weight

_ERROR, _NONZERO, _FLUSHED, _SATURATED, _CAPPED, _NONFINITE, _LOST = range(COUNTS)


@dataclass(frozen=True)
class ObserverConfig:
    enabled: bool = True
    window: int = 50  # number of steps (MoR resets its histograms every 6000 steps)
    every: int = 10  # steps between measurements of plain quantizers; 0: never
    gradients_every: int = 50  # steps between measurements of the weight gradients' error; 0: never


class Observer:
    def __init__(self, config: ObserverConfig) -> None:
        for name, minimum in (("window", 1), ("every", 0), ("gradients_every", 0)):
            if getattr(config, name) < minimum:
                valid = "1 or more" if minimum else "0 (never) or more"
                raise ValueError(f"observer.{name} {getattr(config, name)!r}: expected a number of steps, {valid}")
        self.config = config
        self.layers = 0

    def bind(self, layers: int) -> None:
        """Set the number of layers to observe."""
        self.layers = layers
        self._pending: list[tuple[int, Tensor, Tensor | None]] = []
        self._gradients: list[tuple[int, Tensor]] = []
        self._clear()

    def _clear(self) -> None:
        keys = self.layers * len(SLOTS) * 2  # two: before and after the recipe's switch
        self._histogram = np.zeros((keys, len(BINS) - 1), np.int64)
        self._counts = np.zeros((keys, COUNTS), np.int64)
        self._errors = np.zeros((keys, 2))  # sum and maximum of the micro-batches' mean errors
        self._choices = np.zeros((keys, ENTRIES), np.int64)
        self._gradient = np.zeros((self.layers, 3))  # number of measurements; sums of relative error and cosine

    # ---- called by the layers

    def watches(self, step: int) -> bool:
        return self.config.every > 0 and step % self.config.every == 0

    def watches_gradients(self, step: int) -> bool:
        return self.config.gradients_every > 0 and step % self.config.gradients_every == 0

    def record(self, layer: int, slot: str, counts: Tensor, choice: Tensor | None, *, switched: bool = False) -> None:
        self._pending.append((_key(layer, SLOTS.index(slot), switched), counts, choice))
        if len(self._pending) >= PENDING:
            self.settle()

    def record_weight_gradient(self, layer: int, quantized: Tensor, exact: Tensor) -> None:
        """Record how the weight gradient from quantized operands differs from that of the unquantized operands."""
        q, e = quantized.float(), exact.float()
        norm = torch.linalg.vector_norm(e)
        error = torch.linalg.vector_norm(q - e) / norm
        cosine = torch.nn.functional.cosine_similarity(q.flatten(), e.flatten(), dim=0)
        measured = torch.stack((torch.ones_like(error), error, cosine.clamp(-1, 1)))  # rounding may make it exceed 1
        self._gradients.append((layer, torch.where(norm == 0, 0, measured)))  # a gradient of zeros has no direction

    def settle(self) -> None:
        """Read all pending values from the device."""
        if self._pending:
            keys = np.array([key for key, _, _ in self._pending])
            counts = torch.stack([c.reshape(-1, COUNTS).sum(0) for _, c, _ in self._pending]).cpu().numpy()
            errors = counts[:, _ERROR] / ERROR_ONE / np.maximum(counts[:, _NONZERO], 1)
            np.add.at(self._counts, keys, counts)
            np.add.at(self._histogram, (keys, np.searchsorted(BINS, errors, side="right") - 1), 1)
            np.add.at(self._errors[:, 0], keys, errors)
            np.maximum.at(self._errors[:, 1], keys, errors)
            for key, _, choice in self._pending:
                if choice is not None:
                    taken = torch.bincount(choice.flatten().clamp(max=ENTRIES - 1), minlength=ENTRIES)
                    self._choices[key] += taken.cpu().numpy()
            self._pending = []
        for layer, values in self._gradients:
            self._gradient[layer] += values.double().cpu().numpy()
        self._gradients = []

    # ---- results

    def due(self, step: int) -> bool:
        return (step + 1) % self.config.window == 0

    def rows(self, step: int, layers: Sequence[QuantizedLinear], *, weights: bool = True) -> list[dict[str, Any]]:
        """Return the rows of the window that ends with `step`, and start the next window.

        The gradients of `step` must not be cleared yet. weights=False omits the rows of the weights, for processes that
        hold only a shard of each weight.
        """
        self.settle()
        rows: list[dict[str, Any]] = []
        for layer in layers:
            rows += self._slot_rows(step, layer)
            rows += [self._weight_row(step, layer)] if weights else []
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
            "error": float(self._errors[key, 0] / batches),
            "error_max": float(self._errors[key, 1]),
            "histogram": self._histogram[key].tolist(),
            "flushed": float(self._counts[key, _FLUSHED] / nonzero),
            "saturated": float(self._counts[key, _SATURATED] / nonzero),
            "capped": float(self._counts[key, _CAPPED] / nonzero),
            "lost": int(self._counts[key, _LOST]),
        }
        if decisions := self._choices[key].sum():
            row |= {f"share_{entry}": float(n / decisions) for entry, n in enumerate(self._choices[key])}
        return row

    def _weight_row(self, step: int, layer: QuantizedLinear) -> dict[str, Any]:
        times, error, cosine = self._gradient[layer.index]
        row = self._labels(step, layer, "weight") | {"weight_norm": float(whole(layer.weight.detach()).norm())}
        if layer.weight.grad is not None:
            row["gradient_norm"] = float(whole(layer.weight.grad).norm())
        if times:
            row |= {"gradient_error": float(error / times), "gradient_cosine": float(cosine / times)}
        if (bits := layer.bits) is not None:
            bits = whole(bits.detach())
            row |= {"bits_mean": float(bits.mean()), "bits_std": float(bits.std(correction=0))}
            row |= {"bits_min": float(bits.min()), "bits_max": float(bits.max())}
            row |= {f"bits_to_{tier}": float((bits <= tier).double().mean()) for tier in TIERS}
        return row

    def _labels(self, step: int, layer: QuantizedLinear, slot: str) -> dict[str, Any]:
        return {"step": step, "layer": layer.name, "block": layer.block, "part": layer.part, "slot": slot}

    # ---- checkpoints

    def state(self) -> dict[str, Tensor]:
        self.settle()
        arrays = ("histogram", "counts", "errors", "choices", "gradient")
        return {name: torch.from_numpy(getattr(self, f"_{name}").copy()) for name in arrays}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore a state that `state()` of an observer with the same layers returned."""
        expected, actual = ({name: tuple(values.shape) for name, values in s.items()} for s in (self.state(), state))
        if actual != expected:
            raise ValueError(f"the observer's state has shapes {actual}: these {self.layers} layers need {expected}")
        for name, values in state.items():
            setattr(self, f"_{name}", values.numpy().copy())


def _key(layer: int, slot: int, switched: bool) -> int:
    return (layer * len(SLOTS) + slot) * 2 + switched
