"""Print recipes with the quantizers of their six operand slots and their settings, for `fewbits list recipes`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fewbits.experiments.config import recipe_and_settings
from fewbits.experiments.config_files import folders, name_of, names
from fewbits.models.recipe import HIGH, PART_GROUPS, PARTS, PASSES, SAMPLERS, SQUARES, Keep, Recipe, Sampler, Switch

WIDTH = 110
FIELDS = {  # fields of Recipe that have fields themselves, with the meaning of each of these
    "keep": {
        "first": "number of first blocks whose linear layers get `by` in every slot",
        "last": "number of last blocks whose linear layers get `by` in every slot",
        "parts": f"parts of all blocks that get `by`: {', '.join(PARTS)}, or a group: {', '.join(PART_GROUPS)}",
        "names": "names of layers that get `by`, with * for any characters, such as blocks.0.*",
        "by": "the quantizer of the layers that first, last, parts and names select; high: unquantized",
    },
    "sampler": {
        "kind": f"noise on the weights: {', '.join(SAMPLERS)}",
        "parts": "the parts whose weights are sampled",
        "init": "bit width at the start",
        "target": "bit width towards which weight decay pulls",
        "penalty": "λ, the weight of the bit widths in the loss",
        "block": f"side length of the squares that share a bit width: {', '.join(map(str, SQUARES))}",
        "in_evaluation": "whether evaluation draws noise, too",
    },
    "switch": {
        "at": "fraction of training after which the operands change; 1.0: never",
        "passes": f"the passes whose operands change: {', '.join(PASSES)}",
        "to": "quantizer of these passes' operands from then on; high: unquantized",
    },
}
EXECUTE = "emulate: products of rounded values; fp8: E4M3 products from codes and scales, where torch has them"
GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def print_recipes(name: str | None, searched: Sequence[str], as_json: bool) -> None:
    """Print all recipes, or the recipe `name` with its settings and fields.

    Fields are those of the class Recipe; settings are the other keys in the recipe's file.
    searched: the overrides that set the search path of config folders. If some recipes cannot be read, print the other
    recipes, then raise ValueError with a message about each recipe that cannot be read.
    """
    chosen = names("recipe", folders(searched)) if name is None else [name]
    recipes, wrong = {}, []
    for one in chosen:
        try:
            recipes[one] = recipe_and_settings([*searched, f"recipe={one}"])
        except ValueError as error:
            wrong.append(str(error) if name else f"recipe {one}: {error}")
    if as_json:
        rows = [describe(one, recipe, settings) for one, (recipe, settings) in recipes.items()]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif name is None or wrong:
        print("\n\n".join(_entry(one, recipe) for one, (recipe, _) in recipes.items()))
    else:
        recipe, settings = recipes[name]
        print("\n".join([_entry(str(name_of(name)), recipe), *_setting_lines(settings), *_field_lines(recipe)]))
    if wrong:
        raise ValueError("; ".join(wrong))


def describe(name: str, recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe as JSON data, a dict.

    The key `operands` has the quantizer of each operand slot. The key `output` has the dtype of weight gradients. The
    key `settings` has the argument of this name. The other keys are fields of Recipe.
    settings: the values of the keys in the recipe's file that are not fields of Recipe.
    """
    fields = recipe.to_dict()
    return {
        "name": name,
        "about": recipe.about,
        "operands": {slot: str(resolved.spec or HIGH) for slot, resolved in recipe.operands.items()},
        "output": recipe.wgrad.output,
        **{key: fields[key] for key in ("execute", "keep", "sampler", "switch")},
        "settings": settings,
    }


def _entry(name: str, recipe: Recipe) -> str:
    about = textwrap.wrap(recipe.about, WIDTH - 2)
    more = [*_keep_lines(recipe.keep), *_sampler_lines(recipe.sampler), *_switch_lines(recipe.switch)]
    return "\n  ".join([name, *about, *_slot_lines(recipe), *more])


def _slot_lines(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each GEMM with the quantizers of its operands; a single line if all six are equal."""
    slots = {slot: str(resolved.spec or HIGH) for slot, resolved in recipe.operands.items()}
    dtype = recipe.wgrad.output
    output = f"weight gradients in {'the compute dtype' if dtype == 'compute' else dtype.upper()}"
    if len(set(slots.values())) == 1:
        yield f"all six operands {slots['fprop.x']}  {output}"
        return
    rows = [(gemm, [f"{name} {slots[f'{gemm}.{name}']}" for name in pair]) for gemm, pair in GEMMS.items()]
    first, second = (max(len(cells[column]) for _, cells in rows) for column in (0, 1))
    for gemm, (left, right) in rows:
        yield f"{gemm}  {left:{first}}  {right:{second}}  {output if gemm == 'wgrad' else ''}".rstrip()


def _keep_lines(keep: Keep) -> Iterator[str]:
    ends = (("first", keep.first), ("last", keep.last))
    layers = [f"the {end} {f'{count} blocks' if count > 1 else 'block'}" for end, count in ends if count]
    layers += [*keep.parts, *keep.names]
    if layers:
        yield f"{' and '.join(layers)} kept {keep.by}"


def _sampler_lines(sampler: Sampler) -> Iterator[str]:
    if sampler.kind != "none":
        bits = f"{sampler.init:g} → {sampler.target:g} bits for each {sampler.block}x{sampler.block}"
        yield f"{sampler.kind} on the weights of {' and '.join(sampler.parts)}: {bits}, λ {sampler.penalty:g}"


def _switch_lines(switch: Switch) -> Iterator[str]:
    if switch.at < 1:
        which = "all" if switch.passes == "both" else f"{switch.passes}'s"
        yield f"from {switch.at:.0%} of training on, {which} operands {switch.to}"


def _field_lines(recipe: Recipe) -> Iterator[str]:
    """Yield a heading, then a line with name, value and meaning for each field of the recipe except the operands."""
    rows = [("execute", json.dumps(recipe.execute), EXECUTE)]
    for key, meanings in FIELDS.items():
        values = getattr(recipe, key)
        for field, meaning in meanings.items():
            value = getattr(values, field)
            rows.append((f"{key}.{field}", json.dumps(list(value) if isinstance(value, tuple) else value), meaning))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    yield "  fields of every recipe, changed by recipe.KEY=VALUE (also fprop.x, wgrad.output and the other operands):"
    yield from (f"    {key:{widths[0]}}  {value:{widths[1]}}  {meaning}" for key, value, meaning in rows)


def _setting_lines(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings:
        width = max(map(len, settings))
        yield "  settings, changed by recipe.KEY=VALUE:"
        yield from (f"    {key:{width}}  {json.dumps(value)}" for key, value in settings.items())
