"""Tabulate the weights of a model: the quantizer of each operand slot, or why a weight is not quantized.

The second half tells what operands cost: bits per element, and how much faster GEMMs are than in BF16 at best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from fewbits.common.process import extras
from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.kernels.scaled_products import FORMS, GPUS
from fewbits.models.execution import Executor, describe, form_of_slot, why_emulated
from fewbits.models.experts import LAYERS
from fewbits.models.hooks import Chain, HookStage, Spec
from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import EMULATE, GEMMS, HIGH, SLOTS, Operands, Recipe, parts
from fewbits.models.weights import BlockLinear, OtherWeight, weights

if TYPE_CHECKING:
    import pandas as pd

OPERANDS = (*SLOTS, "wgrad.output", "execute", "sampler", "switch")
COLUMNS = ("layer", "matrices", "block", "part", "out", "in", *OPERANDS, "why")


def layer_table(model: nn.Module) -> pd.DataFrame:
    """Return a table with a row for each weight of a model, quantized or not, in the order of `named_modules`.

    The matrices of experts, of one parameter or of several layers, have one row together if they are quantized alike.

    Columns: `layer`, the module's name; `matrices`, how many the weight consists of; `block`, `part`, `out` and `in`;
    `fprop.x` … `wgrad.x`, the slot's quantizer or mixture at the start of training, or `high`; `wgrad.output`;
    `execute`, which GEMMs are computed from codes and scales, and why the others are not; `sampler`, the kind of noise;
    `switch`, what changes during training; `why` a weight is in high precision, such as `embedding`, or for a layer
    that the recipe's `keep` selects, the setting that selects it, such as `keep.last=2`.

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
    """Yield the settings of the recipe's `keep` that select a layer of a model with this number of blocks."""
    keep = recipe.keep
    if layer.block < keep.first:
        yield f"keep.first={keep.first}"
    if layer.block >= blocks - keep.last:
        yield f"keep.last={keep.last}"
    if layer.part in parts(keep.parts):
        yield f"keep.parts={layer.part}"
    yield from (f"keep.names={glob}" for glob in keep.names if fnmatchcase(layer.name, glob))


# ------------------------------------------------------------------------------------------------ costs

HIGH_BITS = 16.0
HOOK_BITS = {"quest": 4.0, "quest-mxfp4": 4.25}  # hooks that quantize: bits per element with their default settings
# The dense peak rates of products on Hopper and Blackwell data-center GPUs, as multiples of that of BF16 products.
RATES = {"fp8": 2.0, "mxfp8": 2.0, "nvfp4": 4.0}


def bits_per_element(spec: Spec | None) -> tuple[float, float]:
    """Return the fewest and the most bits of an element, with its share of its block's scale.

    Scales of a whole tensor or vector do not count. Mixtures may have several numbers. A chain has those of its last
    stage, or of its hook, if this quantizes and the stage after it only rotates.
    """
    if spec is None:
        return HIGH_BITS, HIGH_BITS
    if isinstance(spec, Chain):
        first = spec.stages[0]
        if isinstance(first, HookStage) and first.name in HOOK_BITS:
            bits_of_hook = dict(first.settings).get("bits", HOOK_BITS[first.name])
            return bits_of_hook, bits_of_hook
        last = spec.stages[-1]
        assert isinstance(last, Quantizer | Mixture)
        return bits_per_element(last)
    entries = [entry.quantizer for entry in spec.entries] if isinstance(spec, Mixture) else [spec]
    bits = [_bits(q) for q in entries]
    return min(bits), max(bits)


def _bits(q: Quantizer) -> float:
    scale, block = q.traits.stored, q.block
    shared = 0.0 if scale is None or block.rows is None or block.cols is None else scale.bits / block.rows / block.cols
    return q.format.bits + shared


def mean_bits(spec: Spec | None, shares: Mapping[str, float]) -> float:
    """Return the mean bits of an element. shares: of each format in a mixture's decisions; without them, the fewest."""
    if isinstance(spec, Mixture) and shares:
        bits = {str(one.quantizer.format): _bits(one.quantizer) for one in spec.entries}
        return sum(shares.get(name, 0.0) * bits[name] for name in bits)
    return bits_per_element(spec)[0]


def product_rates(operands: Operands, major: int | None = None) -> Mapping[str, float]:
    """Return for each GEMM the ratio of its peak rate to that of BF16: 1 if no scaled product has these operands.

    major: the compute capability of the GPUs on which torch must have the product; None: any.
    """
    rates = {}
    for gemm in GEMMS:
        forms = tuple(str(form_of_slot(slot)) for name, slot in operands.items() if name.startswith(f"{gemm}."))
        on = GPUS.get((forms[0], forms[1]), ()) if len(forms) == 2 else ()
        rates[gemm] = RATES[FORMS[forms[0]].kind] if on and major in (None, *on) else 1.0
    return rates


def layer_rate(operands: Operands, major: int | None = None) -> float:
    """Return the ratio of the peak rate of a layer's three GEMMs, which have equal work, to that of BF16."""
    return len(GEMMS) / sum(1 / rate for rate in product_rates(operands, major).values())
