"""Summarise the statistics of a model's quantized layers as metrics for torchtitan (any supported version)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fewbits.models.observer import Observer, ObserverConfig
from fewbits.models.quantize import Quantization
from fewbits.models.quantized_linear import QuantizedLinear

PREFIX = "fewbits"


class LoggedSteps(Observer):
    """An observer that measures plain quantizers only in the steps that torchtitan logs.

    These are the first step and every `interval`-th step. A plain quantizer is one outside a mixture; mixtures are
    observed in every step.
    """

    def __init__(self, interval: int) -> None:
        super().__init__(ObserverConfig(every=interval, gradients_every=0))

    def watches(self, step: int) -> bool:
        return step == 0 or (step + 1) % self.config.every == 0


def numerics(models: Sequence[nn.Module]) -> dict[str, float]:
    """Return metrics of this rank's tokens since the last call, by name; empty if no quantized layer is observed.

    `fewbits/COLUMN/SLOT` is the mean over layers of a column of the observer's rows: relative error (`error`), shares
    of `flushed` and `saturated` values, and the share of a mixture's decisions that chose its i-th quantizer
    (`share_i`, i from 0 to 3). `fewbits/error_max/SLOT` is the largest error of any layer. `fewbits/bits_mean`,
    `fewbits/bits_min` and `fewbits/bits_max` are the mean, smallest and largest bit width of all layers.

    models: the parts of the model that torchtitan trains.
    """
    layers = [module for model in models for module in model.modules() if isinstance(module, QuantizedLinear)]
    quantization = layers[0].owner[0] if layers else None
    if not isinstance(quantization, Quantization) or quantization.observer is None:
        return {}
    rows = quantization.observer.rows(quantization.context.step - 1, layers, weights=False)
    metrics: dict[str, float] = {}
    for slot in dict.fromkeys(row["slot"] for row in rows):
        of_slot = [row for row in rows if row["slot"] == slot]
        for column in ("error", "flushed", "saturated", "share_0", "share_1", "share_2", "share_3"):
            values = [row[column] for row in of_slot if column in row]
            if values:
                metrics[f"{PREFIX}/{column}/{slot}"] = sum(values) / len(values)
        metrics[f"{PREFIX}/error_max/{slot}"] = max(row["error_max"] for row in of_slot)
    return metrics | _bit_widths(layers)


def _bit_widths(layers: Sequence[QuantizedLinear]) -> dict[str, float]:
    with torch.no_grad():
        bits = [
            b.full_tensor() if isinstance(b, DTensor) else b for b in (layer.bits for layer in layers) if b is not None
        ]
    if not bits:
        return {}
    widths = torch.cat([b.flatten() for b in bits])
    return {f"{PREFIX}/bits_{name}": float(getattr(widths, name)()) for name in ("mean", "min", "max")}
