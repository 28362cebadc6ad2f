"""`fewbits recipes`: the recipes of the config tree, what each of the six slots gets, and the settings they offer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from fewbits.experiments.config import load_recipe, names, resolved
from fewbits.models.recipe import HIGH, Keep, Recipe, Sampler, Switch

WIDTH = 110
GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"recipes: {message}")


def main(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="fewbits recipes",
        description="List the recipes and what each operand of the three GEMMs gets; of one recipe, its settings too.",
        epilog="example: fewbits recipes nvfp4, then fewbits train recipe=nvfp4 recipe.rht=32",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of one recipe, mor/block say")
    parser.add_argument("--json", action="store_true", help="the same for programs: a list of objects")
    options = parser.parse_args(argv)
    chosen = names("recipe") if options.name is None else [options.name]
    rows = [described(name) for name in chosen]
    if options.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif options.name is None:
        print("\n\n".join(_entry(name, load_recipe(name)) for name in chosen))
    else:
        print("\n".join([_entry(options.name, load_recipe(options.name)), *_setting_lines(rows[0]["settings"])]))
    return 0


def described(name: str) -> dict[str, Any]:
    """A recipe for programs: its operands in full, what else its fields say, and its settings."""
    recipe = load_recipe(name)
    fields = recipe.to_dict()
    return {
        "name": name,
        "about": recipe.about,
        "operands": {slot: str(resolved.spec or HIGH) for slot, resolved in recipe.operands.items()},
        "output": recipe.wgrad.output,
        **{key: fields[key] for key in ("keep", "sampler", "switch")},
        "settings": settings(name),
    }


def settings(name: str) -> dict[str, Any]:
    """What a recipe's file defines beside the fields of every recipe, for its operands to refer to."""
    data: Mapping[str, Any] = resolved([f"recipe={name}"])["recipe"]
    fields = {field.name for field in dataclasses.fields(Recipe)}
    return {key: value for key, value in data.items() if key not in fields}


def _entry(name: str, recipe: Recipe) -> str:
    about = textwrap.wrap(recipe.about, WIDTH - 2)
    more = [*_kept(recipe.keep), *_sampled(recipe.sampler), *_switched(recipe.switch)]
    return "\n  ".join([name, *about, *_slot_lines(recipe), *more])


def _slot_lines(recipe: Recipe) -> Iterator[str]:
    """A line for each GEMM, or one for all where all are alike."""
    slots = {slot: str(resolved.spec or HIGH) for slot, resolved in recipe.operands.items()}
    output = f"weight gradients in {recipe.wgrad.output.upper()}"
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
