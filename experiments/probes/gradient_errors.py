"""Measure how gradients from quantized operands differ from the exact gradient: cosine, error, bias, noise.

With the exact gradient g, gradients ĝ_s of S rounding seeds, e_s = ĝ_s − g, and ē the mean of e_s over the seeds:

    norm          ‖g‖
    cosine        mean of ⟨ĝ_s, g⟩ / ‖ĝ_s‖‖g‖
    error         √(mean of ‖e_s‖²) / ‖g‖
    bias          ⟨ē, g⟩ / ⟨g, g⟩: the projection coefficient of ĝ on g, less 1
    mean_error    ‖ē‖ / ‖g‖: the error that remains after averaging over the seeds
    noise         √(Σ ‖e_s − ē‖² / (S − 1)) / ‖g‖: the part that changes with the seed; 0 without randomness, NaN for
                  one seed
    systematic    √(mean_error² − noise² / S): the part that averaging over any number of seeds would not remove. Its
                  square is an unbiased estimate; a negative estimate counts as 0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class GradientErrors:
    """The errors of one batch. They are stored per parameter, so that any parameters can be combined to one vector."""

    def __init__(self, exact: Mapping[str, Tensor], *, random: bool) -> None:
        self._exact, self._random = exact, random
        self._norms = {name: _dot(g, g) for name, g in exact.items()}
        self._seeds: list[dict[str, tuple[Tensor, Tensor]]] = []  # ⟨e, g⟩ and ⟨e, e⟩
        self._sums: dict[str, Tensor] = {}  # sum of e over the seeds

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of one more seed; if they do not depend on the seed, call this only once."""
        products = {}
        for name, g in self._exact.items():
            e = gradients[name].float() - g
            products[name] = _dot(e, g), _dot(e, e)
            if self._random:
                self._sums[name] = self._sums[name].add_(e) if name in self._sums else e
        self._seeds.append(products)

    def measures(self, names: Sequence[str]) -> dict[str, float]:
        """Return the measures of these parameters' gradients, taken together as one vector."""
        count = len(self._seeds)
        gg = _total(self._norms[name] for name in names)
        eg = [_total(products[name][0] for name in names) for products in self._seeds]
        ee = [_total(products[name][1] for name in names) for products in self._seeds]
        qq = [max(gg + 2 * along + square, 0.0) for along, square in zip(eg, ee, strict=True)]
        mean, variance = ee[0], math.nan if self._random else 0.0
        if count > 1:
            mean = _total(_dot(self._sums[name], self._sums[name]) for name in names) / count**2
            variance = max(sum(ee) - count * mean, 0.0) / (count - 1)
        norm = math.sqrt(gg)
        return {
            "norm": norm,
            "cosine": sum(_ratio(gg + a, math.sqrt(gg * q)) for a, q in zip(eg, qq, strict=True)) / count,
            "error": _ratio(math.sqrt(sum(ee) / count), norm),
            "bias": _ratio(sum(eg) / count, gg),
            "mean_error": _ratio(math.sqrt(mean), norm),
            "noise": _ratio(math.sqrt(variance), norm),
            "systematic": _ratio(math.sqrt(max(mean - variance / count, 0.0)), norm),
        }


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.flatten().double(), b.flatten().double())


def _total(numbers: Iterable[Tensor]) -> float:
    return float(torch.stack(list(numbers)).sum())


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan
