"""Measure the errors that a recipe causes in gradients, and those of sums with few bits, as in tensor cores.

Of gradients: g is the exact gradient, ĝ_s the one with rounding seed s of S seeds, e_s = ĝ_s − g, ē the mean of e_s:

    norm          ‖g‖
    cosine        mean of ⟨ĝ_s, g⟩ / ‖ĝ_s‖‖g‖
    error         √(mean of ‖e_s‖²) / ‖g‖
    bias          ⟨ē, g⟩ / ⟨g, g⟩: how much longer ĝ is than g in the direction of g (0: equally long)
    mean_error    ‖ē‖ / ‖g‖: the error that remains after averaging over the S seeds
    noise         √(Σ ‖e_s − ē‖² / (S − 1)) / ‖g‖: the part of the error that changes with the seed; 0 for a recipe
                  without random numbers, NaN for a recipe with random numbers and S = 1
    systematic    √(mean_error² − noise² / S): the part of the error that averaging over any number of seeds would not
                  remove. The expression under the root is an unbiased estimate; if it is negative, 0 is used

Of sums (`fewbits probe --accumulators`): an accumulator (fewbits.kernels.accumulators) is a rule by which hardware adds
up products, such as `hopper-fp8`. The operands are those of the forward products of a recipe's quantized layers at a
checkpoint; only some of their rows are used. They are first rounded to the accumulator's input dtype, for FP8 with one
scale for each operand. The product is compared with the exact product of these rounded operands, so that the error
comes from the summation alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fewbits.common.from_dict import one_of
from fewbits.experiments.probes.bench import ALL
from fewbits.kernels.accumulators import ACCUMULATORS, product
from fewbits.kernels.formats import TABLE
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import QuantizedLinear, StepContext

SIDE = 64  # the largest number of rows of x and of w that are used; the product then has 64·64 = 4,096 elements
# The dtype to which the operands of an accumulator are rounded; all accumulators that are not listed here: E4M3.
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "hopper-bf16": torch.bfloat16, "fp32": torch.bfloat16}
# Accumulators of FP4 (kind `grouped`) and of integers need the scales of the operands, which a quantized layer does not
# store.
VALID = tuple(name for name, row in ACCUMULATORS.items() if row.kind in ("format", "fused"))


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
        """Return the measures of the module's docstring for the gradients of these parameters as one vector."""
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


# ------------------------------------------------------------------------------------------------ sums


def check_accumulators(accumulators: Sequence[str]) -> None:
    """Raise ValueError if a name is not one of the accumulators that can be measured (VALID)."""
    for name in accumulators:
        if name in ACCUMULATORS and name not in VALID:
            needs = "needs operands with their scales, which a quantized layer does not store"
            raise ValueError(f"accumulator {name} {needs}: valid values are {', '.join(VALID)}")
        one_of("accumulator", name, VALID)


@torch.no_grad()
def sum_error(x: Tensor, w: Tensor, accumulator: str) -> float:
    """Return ‖p − e‖ / ‖e‖ of x · wᵀ for some rounded rows; p is summed by the accumulator, e is exact."""
    a, b = (_rounded(_sample(operand), accumulator) for operand in (x, w))
    exact = a.double() @ b.double().T
    off = product(a, b.T.contiguous(), accumulator).double() - exact
    return float(off.norm() / exact.norm())


@contextmanager
def measured_sums(quantization: Quantization, accumulators: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield a list, to which each forward product in the `with` block appends a row for each accumulator."""
    rows: list[dict[str, Any]] = []

    def measure(layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, QuantizedLinear)
        x, w = _operands(layer, inputs[0], quantization.context)
        labels = {"layer": layer.name, "block": layer.block, "part": layer.part}
        rows.extend(labels | {"accumulator": name, "error": sum_error(x, w, name)} for name in accumulators)

    hooks = [layer.register_forward_pre_hook(measure) for layer in quantization.layers if accumulators]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _operands(layer: QuantizedLinear, x: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    """Return x and w as the layer multiplies them in its forward pass, bit for bit; no statistics are recorded."""
    rows = x.reshape(-1, layer.in_features)
    quantized = layer.plans[context.switched].x.quantize_one(0, rows, lambda name: layer.seed(context, name))
    weight = layer.quantize_weight_for(0, context, rows.dtype, layer.sampler is not None)
    if not (isinstance(quantized, Tensor) and isinstance(weight, Tensor)):
        raise ValueError("--accumulators needs emulated products: probe the recipe without execute=fp8")
    return quantized, weight


def _sample(operand: Tensor) -> Tensor:
    """Return at most SIDE rows, spread evenly over the operand."""
    rows = operand.shape[0]
    return operand if rows <= SIDE else operand[torch.linspace(0, rows - 1, SIDE).long().to(operand.device)]


def _rounded(operand: Tensor, accumulator: str) -> Tensor:
    """Return the operand rounded to the accumulator's input dtype; for E4M3, it is first scaled to an amax of 448."""
    dtype = DTYPES.get(accumulator, torch.float8_e4m3fn)
    if dtype != torch.float8_e4m3fn:
        return operand.to(dtype)
    largest = TABLE["e4m3"].max
    amax = operand.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    return (operand.float() / amax * largest).clamp(-largest, largest).to(dtype)


# ------------------------------------------------------------------------------------------------ tables

WHOLE = "whole"  # in the column `layer`: the row is about all parameters of the model
SUMS = "sum_error_"  # in summaries, the column `sum_error_NAME` is the error of sums with the accumulator NAME
OPERAND_KEYS = ["layer", "block", "part", "slot", "quantizer"]  # of numerics.parquet
MEASURES = ["norm", "cosine", "error", "bias", "noise", "systematic"]


@dataclass(frozen=True, eq=False)
class Probe:
    """The results of a probe: what was measured, and tables with a column `recipe`.

    rows      the tables probe.parquet of the recipes: a row for each batch, with the losses and the measures of the
              whole gradient, and one for each batch and layer, with the measures of the weight's gradient
    operands  a row for each layer and slot, with statistics over all batches and seeds; operands in high precision have
              no row. A mixture's `error` is that of its first quantizer, whatever it chose
    sums      a row for each batch, seed, layer and accumulator; None without accumulators
    """

    run: str  # the run folder's name
    step: int  # of the checkpoint
    split: str  # from which the batches were read
    batches: int  # the number of batches
    seeds: int  # of a recipe that uses random numbers
    sequences: int  # per batch
    length: int  # tokens per sequence
    dtype: str  # in which the quantized models compute
    reference: str  # the dtype in which the unquantized model computes
    rows: pd.DataFrame
    operands: pd.DataFrame
    sums: pd.DataFrame | None

    @property
    def accumulators(self) -> tuple[str, ...]:
        return () if self.sums is None else tuple(dict.fromkeys(map(str, self.sums["accumulator"])))

    def summary(self) -> pd.DataFrame:
        """Return a row for each recipe with means over batches.

        `increase` is that of the loss in nats per token; `worst_layer` is the layer whose weight gradient has the
        largest mean `error`; `sum_error_NAME` is the error of sums with the accumulator NAME. `increase_se` and
        `bias_se` are standard errors over batches, NaN for one batch. The other columns are measures of the whole
        gradient.
        """
        rows = []
        for recipe, own in self.rows.groupby("recipe", sort=False):
            whole, layers = own[own["layer"] == WHOLE], own[own["layer"] != WHOLE]
            errors = layers.groupby("layer", sort=False)["error"].mean()
            worst = str(errors.idxmax()) if errors.notna().any() else None
            rows.append(
                {
                    "recipe": recipe,
                    "seeds": 1 if (whole["noise"] == 0).all() else self.seeds,
                    "increase": whole["increase"].mean(),
                    "increase_se": whole["increase"].sem(),
                    **{name: whole[name].mean() for name in ("cosine", "error", "bias")},
                    "bias_se": whole["bias"].sem(),
                    **{name: whole[name].mean(skipna=False) for name in ("noise", "systematic")},
                    "worst_layer": worst,
                    "worst_error": math.nan if worst is None else errors.max(),
                }
            )
        sums = self._sums(["recipe"])
        return pd.DataFrame(rows) if sums is None else pd.DataFrame(rows).join(sums, on="recipe")

    def layers(self) -> pd.DataFrame:
        """Return a row for each recipe and layer, with means over batches and seeds.

        Columns: `recipe`, `layer`, `block`, `part`; the measures of the weight's gradient; the relative error of each
        operand, by slot (`fprop.x` …); `sum_error_NAME`. The layer `whole` is the gradient of all parameters.
        """
        keys = ["recipe", "layer"]
        labels = {"block": "first", "part": "first"}
        table = self.rows.groupby(keys, sort=False).agg({**labels, **dict.fromkeys(MEASURES, "mean")})
        table = table.join(self.operands.pivot(index=keys, columns="slot", values="error"))
        sums = self._sums(keys)
        return (table if sums is None else table.join(sums)).reset_index()

    def _sums(self, keys: list[str]) -> pd.DataFrame | None:
        if self.sums is None:
            return None
        return (
            self.sums.groupby([*keys, "accumulator"], sort=False)["error"]
            .mean()
            .unstack("accumulator")
            .add_prefix(SUMS)
        )


# ------------------------------------------------------------------------------------------------ a probe trial


def summarize(table: pd.DataFrame) -> dict[str, float | None]:
    """Return the numbers of result.json from probe.parquet: means over batches for the recipe (variant `all`).

    docs/columns.md defines them. A number that cannot be computed or is not finite is None. `persistent` and `progress`
    are estimated by products of different batches (`Pairs` in probe_trial.py), so that `persistent` can be negative.
    """
    rows = table[(table["variant"] == ALL) & (table["layer"] == WHOLE)]
    numbers: dict[str, float] = {
        "loss": rows["loss"].mean(skipna=False),
        "reference": rows["reference"].mean(skipna=False),
        "increase": rows["increase"].mean(skipna=False),
        "increase_relative": rows["increase"].sum(skipna=False) / rows["reference"].sum(skipna=False),
        **{f"gradient_{name}": rows[name].mean(skipna=False) for name in MEASURES if name != "norm"},
        "gradient_zeros": (rows["zeros"] - rows["zeros_exact"]).mean(skipna=False),
    }
    if "cross_error" in rows:
        sums = rows.iloc[1:].sum(skipna=False)  # the first row has no products
        numbers["persistent"] = _ratio(sums["cross_error"], sums["cross_gradient"])
        numbers["progress"] = 1 + _ratio(sums["cross_progress"], sums["cross_gradient"])
    for place in ("own", "next"):
        if f"decrease_{place}_exact" in rows:
            parts = (rows[f"decrease_{place}_{name}"].sum(skipna=False) for name in ("quantized", "exact"))
            numbers[f"update_{place}"] = _ratio(*parts)
    return {name: float(value) if math.isfinite(value) else None for name, value in numbers.items()}


def numerics_table(rows: Sequence[dict[str, Any]], step: int) -> pd.DataFrame:
    """Return numerics.parquet: a row for each operand, with its statistics over all batches and seeds.

    rows: the statistics of single batches and seeds. step: the checkpoint's step; the column `step` has the number of
    the last update before it.
    """
    frame = pd.DataFrame(rows)
    if frame.empty:
        return frame
    tables = []
    for key, group in frame.groupby(OPERAND_KEYS, sort=False, dropna=False):
        counts = group["batches"].to_numpy(np.float64)
        row: dict[str, Any] = {"step": max(step - 1, 0)} | dict(zip(OPERAND_KEYS, key, strict=True))
        row["batches"] = int(counts.sum())
        row |= {name: _mean(group[name], counts) for name in ("error", "flushed", "saturated", "capped")}
        row |= {"error_max": float(group["error_max"].max()), "lost": int(group["lost"].sum())}
        row["histogram"] = np.sum([np.asarray(histogram) for histogram in group["histogram"]], axis=0).tolist()
        shares = [name for name in group if str(name).startswith("share_") and group[name].notna().all()]
        row |= {str(name): _mean(group[name], counts) for name in shares}
        tables.append(row)
    return pd.DataFrame(tables)


def _mean(values: pd.Series, weights: np.ndarray) -> float:
    return float(np.average(values.to_numpy(np.float64), weights=weights))
