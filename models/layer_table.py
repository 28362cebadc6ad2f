"""Tabulate the weights of a model: the quantizer of each operand slot, or why a weight is not quantized."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from fewbits.common.extras import extras
from fewbits.models.execution import Executor, describe, why_emulated
from fewbits.models.experts import LAYERS
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import EMULATE, HIGH, SLOTS, Recipe, parts
from fewbits.models.weights import BlockLinear, OtherWeight, weights

if TYPE_CHECKING:
    import pandas as pd

OPERANDS = (*SLOTS, "wgrad.output", "execute", "sampler", "switch")
COLUMNS = ("layer", "matrices", "block", "part", "out", "in", *OPERANDS, "why")


def layer_table(model: nn.Module) -> pd.DataFrame:
    """Return a table with a row for each weight of a model, quantized or not, in the order of `named_modules`.

    The matrices of experts, of one parameter or of several layers, have one row together if they are quantized alike.

    Columns: `layer`, the module's name; `matrices`, how many the weight consists of; `block`, the number of the model's
    block (such as a Transformer layer), from 0; `part` (qkv, out, up, down, in); `out` and `in`, the shape of the
    weight; `fprop.x` … `wgrad.x`, the slot's quantizer or mixture at the start of training, or `high` (unquantized);
    `wgrad.output`, the dtype of the weight's gradient before it is added to others; `execute`, which GEMMs are computed
    from codes and scales, and why the others are not; `sampler`, the kind of noise on the
    weight; `switch`, what changes during training; `why`, the reason why a weight is in high precision, such as
    `embedding`; for a layer that the recipe's `keep` selects, the setting that selects it, such as `keep.last=2` (the
    layer then has the quantizer `keep.by`, by default `high`, in every slot).

    >>> quantize(model, "nvfp4")
    >>> print(layer_table(model))
    """
    with extras():
        import pandas as pd
    return pd.DataFrame(list(_rows(model)), columns=list(COLUMNS)).astype({"block": "Int64"})


def _rows(model: nn.Module) -> Iterator[dict[str, Any]]:
    every = list(weights(model))
    layers = [(weight, _quantized(model, weight)) for weight in every]
    blocks = 1 + max((weight.block for weight in every if isinstance(weight, BlockLinear)), default=0)
    rows = (_row(weight, layer, blocks) for weight, layer in layers)
    alike: dict[tuple[tuple[str, Any], ...], list[int]] = {}  # the numbers of experts, by what the row says besides
    for row in rows:
        number = row.pop("number")
        numbers = alike.setdefault(tuple(row.items()), [])
        numbers += [] if number is None else [number]
    for items, numbers in alike.items():
        row = dict(items)
        if numbers:
            row["layer"] = row["layer"].format(_ranges(numbers))
        yield row | {"matrices": max(1, len(numbers))}


def _ranges(numbers: list[int]) -> str:
    """Return increasing numbers as text, such as `0-3,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _row(weight: BlockLinear | OtherWeight, layer: QuantizedLinear | None, blocks: int) -> dict[str, Any]:
    """Return a row without `matrices`, in `number` an expert's number, and in `layer` `{}` in its place.

    blocks: those of the model.
    """
    row: dict[str, Any] = dict.fromkeys(SLOTS, HIGH) | dict.fromkeys(OPERANDS[len(SLOTS) :], "")
    row |= {"layer": weight.name, "out": weight.shape[0], "in": math.prod(weight.shape[1:]), "number": None}
    if isinstance(weight, OtherWeight):
        return row | {"why": weight.why}
    row |= {"block": weight.block, "part": weight.part}
    if weight.expert is not None:
        row |= {"layer": weight.name.rpartition(".")[0] + ".{}", "number": weight.expert.number}
    elif weight.is_expert:
        outside, _, inside = weight.name.partition(".experts.")
        number, _, last = inside.partition(".")
        row |= {"layer": f"{outside}.experts.{{}}.{last}", "number": int(number)}
    if layer is None:
        return row | {"why": "the model is not quantized"}
    recipe = layer.owner[0].recipe
    row |= {slot: str(operand.spec or HIGH) for slot, operand in layer.plans[0].operands.items()}
    row["wgrad.output"] = recipe.wgrad.output
    on = Executor.of(next(weight.module.parameters()).device, recipe.execute)
    if recipe.execute != EMULATE:
        row["execute"] = describe(recipe, [why_emulated(recipe, layer.plans[0].operands, weight, on)], on)
    row["sampler"] = layer.sampler.kind if layer.sampler else ""
    if recipe.switches and layer.plans[1] is not layer.plans[0]:
        row["switch"] = f"{recipe.switch.passes} to {recipe.switch.to} at {recipe.switch.at:g}"
    why = " and ".join(kept_by(recipe, layer, blocks))
    return row | {"why": why or ("" if layer.quantizes or layer.sampler else f"recipe {recipe.name}")}


def _quantized(model: nn.Module, weight: BlockLinear | OtherWeight) -> QuantizedLinear | None:
    """Return the layer that multiplies by a weight, if `quantize` has replaced it."""
    if isinstance(weight, OtherWeight):
        return None
    layer = weight.module
    if weight.expert is not None:
        if not hasattr(layer, LAYERS):
            return None
        layer = getattr(layer, LAYERS)[weight.expert.parameter][weight.expert.number]
    return layer if isinstance(layer, QuantizedLinear) else None


def kept_by(recipe: Recipe, layer: BlockLinear | QuantizedLinear, blocks: int) -> Iterator[str]:
    """Yield the settings of the recipe's `keep` that select a layer, such as `keep.last=2`.

    blocks: the number of blocks of the model.
    """
    keep = recipe.keep
    if layer.block < keep.first:
        yield f"keep.first={keep.first}"
    if layer.block >= blocks - keep.last:
        yield f"keep.last={keep.last}"
    if layer.part in parts(keep.parts):
        yield f"keep.parts={layer.part}"
    yield from (f"keep.names={glob}" for glob in keep.names if fnmatchcase(layer.name, glob))
