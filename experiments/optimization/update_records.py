"""Measure gradients and updates of a trial for precision.parquet: exponents, zeros, and updates that get lost.

An update u ≠ 0 of a weight w is lost in a format if round(round(w) + u) = round(w), rounded to nearest in this format:
a weight that is stored in the format does not change. `lost_bf16` and `lost_fp16` count these updates, whatever format
the trial stores weights in. `lost` counts the updates that did not change the weights that the trial stores.

The exponent of a gradient g is floor(log2 |g|), without the loss scale. The histogram of exponents shows which
gradients would be 0 with another loss scale, because FP16 rounds magnitudes up to 2^-25 to 0. Measured are the
gradients of parameters, summed over micro-batches, and those of the results of linear layers (dy), in the model's
dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

LOWEST, HIGHEST = -64, 15  # exponents of the first and the last bin, which also count all lower and all higher ones
BINS = HIGHEST - LOWEST + 1
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ZEROS, _NONFINITE, _VALUES = range(BINS, BINS + 3)  # indices of the counts that `gradient_counts` appends


class UpdateRecords:
    """Collects the rows of precision.parquet: at every `every`-th update, a row for each parameter and linear layer."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self.every, self.rows = every, list[dict[str, Any]]()
        self._scale: float | None = None  # the loss scale while an update is measured, else None
        self._dy: dict[str, Tensor] = {}  # sums of `gradient_counts` over micro-batches, by layer
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda _module, _inputs, y, name=name: self._watch(name, y))

    def due(self, step: int) -> bool:
        """Tell whether this update is measured."""
        return step % self.every == 0

    def begin(self, step: int, scale: float) -> None:
        """Start update `step`; to be called before its first forward pass. scale: the loss scale of this update."""
        self._scale, self._dy = scale if self.due(step) else None, {}

    def _watch(self, name: str, y: Tensor) -> None:
        if self._scale is not None and y.requires_grad:
            y.register_hook(lambda dy: self._add_dy(name, dy))

    def _add_dy(self, name: str, dy: Tensor) -> None:
        if self._scale is not None:
            counts = gradient_counts(dy, self._scale)
            self._dy[name] = self._dy[name] + counts if name in self._dy else counts

    def add_gradients(self, step: int, params: Mapping[str, Tensor]) -> None:
        """Add the rows of update `step` if it is measured. params: by name; with unscaled gradients."""
        if self._scale is None:
            return
        self._scale = None
        grads = {name: param.grad for name, param in params.items() if param.grad is not None}
        counts = {("parameter", name): gradient_counts(grad) for name, grad in grads.items()}
        counts |= {("dy", name): count for name, count in self._dy.items()}
        numbers = torch.stack([*counts.values()]).tolist()
        for (slot, name), count in zip(counts, numbers, strict=True):
            self.rows.append(
                {
                    "step": step,
                    "layer": name,
                    "slot": slot,
                    "values": count[_VALUES],
                    "zeros": count[_ZEROS],
                    "nonfinite": count[_NONFINITE],
                    "histogram": count[:BINS],
                }
            )

    def add_updates(
        self, step: int, before: Mapping[str, Tensor], exact: Mapping[str, Tensor], stored: Mapping[str, Tensor]
    ) -> None:
        """Add the counts of lost updates to the rows of the parameters at update `step` (see `update_counts`)."""
        rows = {row["layer"]: row for row in self.rows if row["step"] == step and row["slot"] == "parameter"}
        for name, row in rows.items():
            row |= update_counts(before[name], exact[name], stored[name].detach())

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: `rows` without their histograms, and `histograms`, int64 [rows, BINS]."""
        histograms = torch.tensor([row["histogram"] for row in self.rows], dtype=torch.int64).view(-1, BINS)
        rows = [{key: value for key, value in row.items() if key != "histogram"} for row in self.rows]
        return {"rows": rows, "histograms": histograms}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the rows that `state()` returned."""
        self.rows = [
            # The columns must have the same order as in a new row.
            {key: row[key] for key in row if key not in COUNTED}
            | {"histogram": histogram}
            | {key: row[key] for key in COUNTED if key in row}
            for row, histogram in zip(state["rows"], state["histograms"].tolist(), strict=True)
        ]


# The columns of `update_counts`.
COUNTED = ("updates", "lost", *(f"lost_{name}" for name in FORMATS))


@torch.no_grad()
def gradient_counts(grad: Tensor, scale: float = 1.0) -> Tensor:
    """Return one tensor: the histogram of exponents of grad / scale; then _ZEROS, _NONFINITE and _VALUES."""
    magnitude = grad.float().abs()
    zeros, nonfinite = (magnitude == 0).sum(), (~magnitude.isfinite()).sum()
    ordinary = magnitude[magnitude.isfinite() & (magnitude > 0)]
    exponents = torch.frexp(ordinary)[1] - 1 - (math.frexp(scale)[1] - 1)
    bins = torch.bincount(exponents.clamp(LOWEST, HIGHEST) - LOWEST, minlength=BINS)
    return torch.cat((bins, torch.stack((zeros, nonfinite, torch.full_like(zeros, grad.numel())))))


@torch.no_grad()
def update_counts(before: Tensor, exact: Tensor, stored: Tensor) -> dict[str, int]:
    """Return how many weights have an update other than 0, and how many of these are lost: the columns COUNTED.

    before, exact, stored: the weights before the update, after it in FP32, and after it as the trial stores them.
    """
    changed = exact != before
    lost = {"lost": changed & (stored == before)}
    for name, dtype in FORMATS.items():
        start = before.to(dtype).float()
        lost[f"lost_{name}"] = changed & ((start + (exact - before)).to(dtype) == start)
    counts = torch.stack([changed.sum(), *(where.sum() for where in lost.values())]).tolist()
    return dict(zip(COUNTED, counts, strict=True))
