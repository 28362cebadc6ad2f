"""Measure how gradients from quantized operands differ from the exact gradient: cosine, error, bias, noise.

g is the exact gradient, ĝ_s the gradient with rounding seed s of S seeds, e_s = ĝ_s − g, and ē the mean of e_s over s:

    norm          ‖g‖
    cosine        mean of ⟨ĝ_s, g⟩ / ‖ĝ_s‖‖g‖
    error         √(mean of ‖e_s‖²) / ‖g‖
    bias          ⟨ē, g⟩ / ⟨g, g⟩: how much longer ĝ is than g in the direction of g (0: equally long)
    mean_error    ‖ē‖ / ‖g‖: the error that remains after averaging over the S seeds
    noise         √(Σ ‖e_s − ē‖² / (S − 1)) / ‖g‖: the part of the error that changes with the seed; 0 for a recipe
                  without random numbers, NaN for a recipe with random numbers and S = 1
    systematic    √(mean_error² − noise² / S): the part of the error that averaging over any number of seeds would not
                  remove. The expression under the root is an unbiased estimate; if it is negative, 0 is used
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class GradientErrors:
    """Collects the gradients of one batch for several seeds, and computes the measures for any set of parameters.

    exact: the exact gradient by parameter name. random: whether the recipe uses random numbers.
    """

    def __init__(self, exact: Mapping[str, Tensor], *, random: bool) -> None:
        self._exact, self._random = exact, random
        self._norms = {name: _dot(g, g) for name, g in exact.items()}
        self._seeds: list[dict[str, tuple[Tensor, Tensor]]] = []  # for each seed and parameter: ⟨e, g⟩ and ⟨e, e⟩
        self._sums: dict[str, Tensor] = {}  # for each parameter: the sum of e over the seeds

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of one more seed, by parameter name. Call it once if the recipe uses no random numbers."""
        products = {}
        for name, g in self._exact.items():
            e = gradients[name].float() - g
            products[name] = _dot(e, g), _dot(e, e)
            if self._random:
                self._sums[name] = self._sums[name].add_(e) if name in self._sums else e
        self._seeds.append(products)

    def measures(self, names: Sequence[str]) -> dict[str, float]:
        """Return the measures `norm`, `cosine`, `error` and so on, which the module's docstring defines, by name.

        names: the parameters whose gradients, concatenated to one vector, are measured.
        """
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
    """Return a / b; NaN if b is 0."""
    return a / b if b else math.nan
