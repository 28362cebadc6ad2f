"""Check claim N26 by counting layers: the shares of linear layers of the paper's models that stay in BF16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from fewbits.analysis.engine.claims.hooks import exact
from fewbits.analysis.engine.results.data import Exact
from fewbits.analysis.engine.results.paper import paper
from fewbits.experiments.config import load_recipe
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import on_meta
from fewbits.models.quantize import keep, linear_layers
from fewbits.models.recipe import Keep


@dataclass(frozen=True)
class Kept:
    """The number of linear layers that stay in BF16 (`kept`), and the number of all linear layers."""

    kept: int
    layers: int

    @property
    def share(self) -> float:
        return self.kept / self.layers


@cache
def kept(model: str, first: int, last: int) -> Kept:
    """Count the linear layers of a preset (`model`) that NVFP4's recipe keeps in BF16.

    first, last: how many blocks at the start and at the end of the model stay in BF16.
    """
    found = list(linear_layers(on_meta(MODELS[model])))
    recipe = replace(load_recipe("nvfp4"), keep=Keep(first=first, last=last))
    return Kept(len(keep(recipe, found, 1 + max(layer.block for layer in found))), len(found))


@exact("nvfp4", "N26")
def n26() -> Exact:
    """Check that the shares of layers in BF16, rounded to whole percent, are those that the paper states.

    In the paper, the linear layers of the first two and the last eight blocks of the 12B model are in BF16, and of the
    8B model those of the last eight blocks.
    """
    found = {"12B": kept("hybrid-12b", 2, 8), "8B": kept("hybrid-8b", 0, 8)}
    stated = {name: paper("nvfp4").numbers[f"kept-{name.lower()}"].value for name in found}
    holds = all(abs(one.share - stated[name]) < 0.005 for name, one in found.items())
    words = (
        f"{name} {one.kept} of {one.layers}, {one.share:.1%} (the paper: {stated[name]:.0%})"
        for name, one in found.items()
    )
    return Exact(holds, "; ".join(words))
