"""Tabulate the linear layers of a model: the quantizer of each operand slot, or why a layer stays in high precision."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fewbits.models.quantized_linear import QuantizedLinear
from fewbits.models.recipe import HIGH, SLOTS, Recipe, parts

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("layer", "block", "part", "out", "in", *SLOTS, "sampler", "why")


def layer_table(model: nn.Module) -> pd.DataFrame:
    """Return a table with a row for each linear layer of a model, quantized or not, in the order of `named_modules`.

    Columns: `layer`, the module's name; `block`, the number of the model's block (such as a Transformer layer), from
    0; `part` (qkv, out, up, down, in); `out` and `in`, the shape of the weight; `fprop.x` … `wgrad.x`, the slot's
    quantizer or mixture at the start of training, or `high` (unquantized); `sampler`, the kind of noise on the weight;
    `why`, the reason why a layer is in high precision; for a layer that the recipe's `keep` selects, the setting that
    selects it, such as `keep.last=2` (the layer then has the quantizer `keep.by`, by default `high`, in every slot).

    >>> quantize(model, load_recipe("nvfp4"))
    >>> print(layer_table(model))
    """
    import pandas as pd

    return pd.DataFrame(list(_rows(model)), columns=list(COLUMNS)).astype({"block": "Int64"})


def _rows(model: nn.Module) -> Iterator[dict[str, Any]]:
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    quantized = [module for _, module in linears if isinstance(module, QuantizedLinear)]
    blocks = 1 + max((layer.block for layer in quantized), default=0)
    for name, module in linears:
        out, inner = module.weight.shape
        row = {"layer": name, "out": out, "in": inner, "why": "", "sampler": ""}
        if isinstance(module, QuantizedLinear):
            recipe = module.owner[0].recipe
            slots = {slot: str(operand.spec or HIGH) for slot, operand in module.plans[0].operands.items()}
            noise = module.sampler.kind if module.sampler else ""
            why = " and ".join(_kept_by(recipe, module, blocks))
            if not why and not noise and set(slots.values()) == {HIGH}:
                why = f"recipe {recipe.name}"
            yield row | slots | {"block": module.block, "part": module.part, "sampler": noise, "why": why}
        elif isinstance(module, NonDynamicallyQuantizableLinear):
            yield row | dict.fromkeys(SLOTS, HIGH) | {"why": "inside nn.MultiheadAttention"}
        else:
            why = "outside the blocks" if quantized else "the model is not quantized"
            yield row | dict.fromkeys(SLOTS, HIGH) | {"part": getattr(module, "part", None), "why": why}


def _kept_by(recipe: Recipe, layer: QuantizedLinear, blocks: int) -> Iterator[str]:
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
