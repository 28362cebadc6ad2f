"""`fewbits recipes`: the recipes of the config tree, what each of the six slots gets, and the settings they offer."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fewbits.common.arguments import CommandParser
from fewbits.experiments.config import names, resolved
from fewbits.models.recipe import HIGH, Keep, Recipe, Sampler, Switch

WIDTH = 110
GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        "fewbits recipes",
        about="List the recipes and what each operand of the three GEMMs gets; of one recipe, its settings too.",
        examples="example: fewbits recipes nvfp4, then fewbits train recipe=nvfp4 recipe.rht=32",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of one recipe, mor/block say")
    parser.add_argument("--json", action="store_true", help="the same for programs: a list of objects")
    options = parser.parse_args(argv)
    found = {name: read(name) for name in (names("recipe") if options.name is None else [options.name])}
    if options.json:
        rows = [described(name, recipe, settings) for name, (recipe, settings) in found.items()]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif options.name is None:
        print("\n\n".join(_entry(name, recipe) for name, (recipe, _) in found.items()))
    else:
        recipe, settings = found[options.name]
        print("\n".join([_entry(options.name, recipe), *_setting_lines(settings)]))
    return 0


def read(name: str) -> tuple[Recipe, dict[str, Any]]:
    """A recipe, and its settings: what its file defines beside a recipe's fields, for the operands to refer to."""
    data = resolved([f"recipe={name}"])["recipe"]
    fields = {field.name for field in dataclasses.fields(Recipe)}
    recipe = Recipe.from_dict({key: value for key, value in data.items() if key in fields})
    return recipe, {key: value for key, value in data.items() if key not in fields}


def described(name: str, recipe: Recipe, settings: Mapping[str, Any]) -> dict[str, Any]:
    """For programs: the operands in full, what else the fields say, and the settings."""
    fields = recipe.to_dict()
    return {
        "name": name,
        "about": recipe.about,
        "operands": {slot: str(resolved.spec or HIGH) for slot, resolved in recipe.operands.items()},
        "output": recipe.wgrad.output,
        **{key: fields[key] for key in ("keep", "sampler", "switch")},
        "settings": settings,
    }


def _entry(name: str, recipe: Recipe) -> str:
    about = textwrap.wrap(recipe.about, WIDTH - 2)
    more = [*_kept(recipe.keep), *_sampled(recipe.sampler), *_switched(recipe.switch)]
    return "\n  ".join([name, *about, *_slot_lines(recipe), *more])


def _slot_lines(recipe: Recipe) -> Iterator[str]:
    """A line for each GEMM, or one for all where all are alike."""
    slots = {slot: str(resolved.spec or HIGH) for slot, resolved in recipe.operands.items()}
    dtype = recipe.wgrad.output
    output = f"weight gradients in {'the compute dtype' if dtype == 'compute' else dtype.upper()}"
    if len(set(slots.values())) == 1:
        yield f"all six operands {slots['fprop.x']}  {output}"
        return
    rows = [(gemm, [f"{name} {slots[f'{gemm}.{name}']}" for name in pair]) for gemm, pair in GEMMS.items()]
    first, second = (max(len(cells[column]) for _, cells in rows) for column in (0, 1))
    for gemm, (one, other) in rows:
        yield f"{gemm}  {one:{first}}  {other:{second}}  {output if gemm == 'wgrad' else ''}".rstrip()


def _kept(keep: Keep) -> Iterator[str]:
    ends = (("first", keep.first), ("last", keep.last))
    which = [f"the {end} {f'{count} blocks' if count > 1 else 'block'}" for end, count in ends if count]
    which += [*keep.parts, *keep.names]
    if which:
        yield f"{' and '.join(which)} kept {keep.by}"


def _sampled(sampler: Sampler) -> Iterator[str]:
    if sampler.kind != "none":
        bits = f"{sampler.init:g} → {sampler.target:g} bits for each {sampler.block}x{sampler.block}"
        yield f"{sampler.kind} on the weights of {' and '.join(sampler.parts)}: {bits}, λ {sampler.penalty:g}"


def _switched(switch: Switch) -> Iterator[str]:
    if switch.at < 1:
        which = "all" if switch.passes == "both" else f"{switch.passes}'s"
        yield f"from {switch.at:.0%} of training on, {which} operands {switch.to}"


def _setting_lines(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings:
        width = max(map(len, settings))
        yield "  settings, changed by recipe.KEY=VALUE:"
        yield from (f"    {key:{width}}  {json.dumps(value)}" for key, value in settings.items())
