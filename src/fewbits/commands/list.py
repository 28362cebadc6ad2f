"""List what overrides can choose, and the studies (`fewbits list GROUP`), or show one of them with its settings."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fewbits.common.arguments import WIDTH, CommandParser
from fewbits.common.from_dict import from_dict, one_of
from fewbits.common.terminal import print_json, print_table
from fewbits.common.wording import flat

if TYPE_CHECKING:
    from fewbits.experiments.config_files import Folders
    from fewbits.models.recipe import Recipe

T = TypeVar("T")

GROUPS = {  # what the command lists, and the key of the override that chooses one of it
    "recipes": "recipe",
    "models": "model",
    "scales": "scale",
    "schedules": "schedule",
    "optimizers": "optimizer",
    "precisions": "precision",
    "data": "data",
    "studies": "study",
}
EXAMPLES = """\
examples:
  fewbits list recipes                     all recipes, with the quantizer of each operand of the three GEMMs
  fewbits list recipes nvfp4               one recipe with its settings, as in fewbits train recipe=nvfp4 recipe.rht=32
  fewbits list models --json --config-dir conf
"""
COLUMNS = ("name", "about", "settings")
ATLAS = {  # numbers of the atlas, in percent
    "loss": "loss {:+.3g} %",
    "error": "gradient error {:.3g} %",
    "bias": "its bias {:.3g} %",
    "noise": "its noise {:.3g} %",
    "trained": "loss by training {:+.3g} %",
    "tokens": "extra tokens {:+.3g} %",
}
GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits list", __doc__, EXAMPLES)
    parser.add_argument("group", choices=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("name", nargs="?", metavar="NAME", help="show only this one, with its settings; or ./FILE.yaml")
    parser.add_config_dir()
    parser.add_argument("--json", action="store_true", help="print JSON: a list of objects")
    options = parser.parse_args(argv)
    if options.group == "studies":
        _print_studies(options.name, options.json)
        return 0

    from fewbits.experiments.config_files import with_config_dir

    searched, group = with_config_dir([], options.config_dir), GROUPS[options.group]
    if group == "recipe":
        _print_recipes(options.name, searched, options.json)
    elif group == "model":
        _print_models(options.name, searched, options.json)
    else:
        _print_group(group, options.name, searched, options.json)
    return 0


def _setting_lines(settings: Mapping[str, Any], heading: str = "settings, changed by KEY=VALUE") -> Iterator[str]:
    if settings:
        width = max(map(len, settings))
        yield f"  {heading}:"
        yield from (f"    {name:{width}}  {json.dumps(value)}" for name, value in settings.items())


def _read(group: str, name: str | None, searched: Sequence[str], read: Callable[[str], T]) -> tuple[dict[str, T], str]:
    """Read the config `name`, or all of a group; return what could be read, and the errors of the others."""
    from fewbits.experiments.config_files import folders, names

    configs, wrong = {}, []
    for one in names(group, folders(searched)) if name is None else [name]:
        try:
            configs[one] = read(one)
        except ValueError as error:
            wrong.append(str(error) if name else f"{group} {one}: {error}")
    return configs, "; ".join(wrong)


# ------------------------------------------------------------------------------------------------ studies


def _print_studies(name: str | None, as_json: bool) -> None:
    from fewbits.sweeps.planning.studies import STUDIES, outline_of

    if name is not None:
        one_of("study", name, STUDIES)
    studies = [study for study in STUDIES.values() if name in (None, study.name)]
    if as_json:
        sweeps = {} if name is None else {"sweeps": outline_of(studies[0])}
        print_json([{**dataclasses.asdict(study), "recipes": study.recipes, **sweeps} for study in studies])
        return
    entries = []
    for study in studies:
        title = f"{study.title} (arXiv {study.arxiv})" if study.arxiv else study.title
        entries.append("\n  ".join([study.name, title, study.about, f"recipes {', '.join(study.recipes)}"]))
    for sweep in [] if name is None else outline_of(studies[0]):
        arms = textwrap.fill(
            f"arms {', '.join(sweep['arms'])}", WIDTH, subsequent_indent="    ", break_on_hyphens=False
        )
        entries.append(
            "\n  ".join([f"sweep={sweep['name']}", sweep["about"], f"scales {', '.join(sweep['scales'])}", arms])
        )
    print("\n\n".join(entries))


# ------------------------------------------------------------------------------------------------ recipes


def _print_recipes(name: str | None, searched: Sequence[str], as_json: bool) -> None:
    """Print all recipes, or one with its settings (keys that are no fields); raise ValueError if some are wrong."""
    from fewbits.experiments.config import recipe_and_settings
    from fewbits.experiments.config_files import name_of

    recipes, wrong = _read("recipe", name, searched, lambda one: recipe_and_settings([*searched, f"recipe={one}"]))
    if as_json:
        rows = []
        for one, (recipe, settings) in recipes.items():
            texts = {"about": recipe.about, "source": recipe.source, "differs": recipe.differs}
            head = {"name": one, **texts, "operands": _operands(recipe), "output": recipe.wgrad.output}
            rows.append({**head, **_fields(recipe), "settings": settings, "atlas": _atlas().get(one)})
        print_json(rows)
    elif name is None or wrong:
        print("\n\n".join(_entry(one, recipe) for one, (recipe, _) in recipes.items()))
    else:
        recipe, settings = recipes[name]
        lines = [
            *_setting_lines(settings, "settings, changed by recipe.KEY=VALUE"),
            *_setting_lines(dict(flat(_fields(recipe))), "fields of every recipe (models/recipe.py)"),
        ]
        print("\n".join([_entry(str(name_of(name)), recipe), *lines]))
    if wrong:
        raise ValueError(wrong)


def _operands(recipe: Recipe) -> dict[str, str]:
    from fewbits.models.recipe import HIGH

    return {slot: str(resolved.spec or HIGH) for slot, resolved in recipe.operands.items()}


def _fields(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe except the operands."""
    fields = recipe.to_dict()
    return {key: fields[key] for key in ("execute", "keep", "rules", "sampler", "switch", "delayed")}


def _entry(name: str, recipe: Recipe) -> str:
    """Return the lines about a recipe: quantizers, and what differs from quantizing all layers from the first step."""
    keep, sampler, switch = recipe.keep, recipe.sampler, recipe.switch
    lines = [name, *textwrap.wrap(recipe.about, WIDTH - 2)]
    for key in ("source", "differs"):
        if text := getattr(recipe, key):
            lines += textwrap.wrap(f"{key}: {text}", WIDTH - 2)
    lines += _slot_lines(recipe)
    for rule in recipe.rules:
        slots = ", ".join(f"{slot} {text}" for slot, text in rule.slots.items())
        lines.append(f"layers with {rule.match}: {slots}")
    ends = (("first", keep.first), ("last", keep.last))
    layers = [f"the {end} {f'{count} blocks' if count > 1 else 'block'}" for end, count in ends if count]
    if layers := [*layers, *keep.parts, *keep.names]:
        lines.append(f"{' and '.join(layers)} kept {keep.by}")
    if sampler.kind != "none":
        bits = f"{sampler.init:g} → {sampler.target:g} bits for each {sampler.block}x{sampler.block}"
        lines.append(f"{sampler.kind} on the weights of {' and '.join(sampler.parts)}: {bits}, λ {sampler.penalty:g}")
    if recipe.delayed.slots:
        d, slots = recipe.delayed, ", ".join(recipe.delayed.slots)
        lines.append(f"scales of {slots} from the {d.use} amax of {d.history} steps, held for {d.hold}")
    if switch.at < 1:
        which = "all" if switch.passes == "both" else f"{switch.passes}'s"
        lines.append(f"from {switch.at:.0%} of training on, {which} operands {switch.to}")
    lines += _atlas_lines(_atlas().get(name, {}))
    return "\n  ".join(lines)


@cache
def _atlas() -> dict[str, Any]:
    """Return what docs/atlas.py has written about each recipe; empty if it has not run."""
    from fewbits.experiments.config_files import FOLDER

    file = FOLDER / "atlas.json"
    return cast(dict[str, Any], json.loads(file.read_text("utf-8"))["recipes"]) if file.is_file() else {}


def _atlas_lines(row: Mapping[str, Any]) -> Iterator[str]:
    for model, values in row.get("measured", {}).items():
        parts = [f"{values.get('bits', row['bits']):.3g} bits"]
        parts += [text.format(values[key][0]) for key, text in ATLAS.items() if key in values]
        yield f"atlas, {model}: {', '.join(parts)}"
    if row.get("measured"):
        yield f"atlas, product time: {row['H100']:.2f} of BF16's on H100, {row['B200']:.2f} on B200"


def _slot_lines(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each GEMM with the quantizers of its operands; a single line if all six are equal."""
    slots, dtype = _operands(recipe), recipe.wgrad.output
    output = f"weight gradients in {'the compute dtype' if dtype == 'compute' else dtype.upper()}"
    if len(set(slots.values())) == 1:
        yield f"all six operands {slots['fprop.x']}  {output}"
        return
    rows = [(gemm, [f"{name} {slots[f'{gemm}.{name}']}" for name in pair]) for gemm, pair in GEMMS.items()]
    first, second = (max(len(cells[column]) for _, cells in rows) for column in (0, 1))
    for gemm, (left, right) in rows:
        yield f"{gemm}  {left:{first}}  {right:{second}}  {output if gemm == 'wgrad' else ''}".rstrip()


# ------------------------------------------------------------------------------------------------ models


def _print_models(name: str | None, searched: Sequence[str], as_json: bool) -> None:
    from fewbits.experiments.config import resolved
    from fewbits.models.networks.decoder import DecoderConfig
    from fewbits.models.networks.presets import MODELS
    from fewbits.models.networks.registry import describe, linear_parameters, parameters

    def read(one: str) -> DecoderConfig:
        return MODELS.get(one) or from_dict(DecoderConfig, resolved([*searched, f"model={one}"])["model"], "model")

    configs, wrong = _read("model", name, searched, read)
    rows = [(name, parameters(one), linear_parameters(one), describe(one)) for name, one in configs.items()]
    if as_json:
        columns = ("name", "parameters", "linear_parameters", "description")
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif rows:
        cells = [(name, f"{total:,}", f"{linear:,}", about) for name, total, linear, about in rows]
        print_table(("name", "parameters", "linear", "description"), cells, right=("parameters", "linear"))
    if wrong:
        raise ValueError(wrong)


# ------------------------------------------------------------------------------------------------ other groups


def _print_group(group: str, name: str | None, searched: Sequence[str], as_json: bool) -> None:
    """Print the names and descriptions of all configs in a group, or the settings of the config `name`."""
    from fewbits.experiments.config_files import check_choice, folders, names

    own = folders(searched)
    if name is not None:
        check_choice(group, name, own)
    chosen = names(group, own) if name is None else [name]
    rows = [(name, _about(group, name, own), _settings(group, name, searched, own)) for name in chosen]
    if as_json:
        print_json([dict(zip(COLUMNS, row, strict=True)) for row in rows])
        return
    if name is None:
        print_table(COLUMNS[:2], [(name, about) for name, about, _ in rows])
    else:
        print("\n".join([name, f"  {rows[0][1]}", *_setting_lines(rows[0][2])]))
    if group == "data":
        from fewbits.experiments.data.tokenizing import SPELLINGS

        print(f"\ndata.tokenizer: {SPELLINGS}; the default is bytes. A folder of tokens has its own tokenizer.")
        print("data=text data.path=FILE trains on your own text, data=bin data.path=DIR on train.bin and val.bin.")
        print("`fewbits data NAME` downloads and tokenizes openwebtext, c4 and c4-nemotron.")


def _about(group: str, name: str, own: Folders) -> str:
    """Return a config's description: the comment at the head of its file, or the summary of a kind of data."""
    from fewbits.experiments.data.load import KINDS

    if group == "data" and name in KINDS:
        return KINDS[name].summary
    head = re.match(r"(?:#.*\n)*", _file(group, name, own).read_text("utf-8"))
    comments = [line.removeprefix("#").strip() for line in head[0].splitlines()] if head else []
    return " ".join(comment for comment in comments if not comment.startswith("@package"))


def _file(group: str, name: str, own: Folders) -> Path:
    from fewbits.experiments.config_files import FOLDER, is_path

    return Path(name).expanduser() if is_path(name) else own.file(group, name) or FOLDER / group / f"{name}.yaml"


def _settings(group: str, name: str, searched: Sequence[str], own: Folders) -> dict[str, Any]:
    """Return a config's settings: the value of each, by the key of its override, such as `optimizer.lr`.

    For a scale, return only what the scale's own file sets: settings, and choices of other groups' configs.
    """
    from omegaconf import OmegaConf

    from fewbits.experiments.config import resolved

    if group != "scale":
        config = resolved([*searched, f"{group}={name}"])
        also = {"training.dtype": config["training"]["dtype"]} if group == "precision" else {}
        return also | dict(flat(config[group], group))
    content = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(_file(group, name, own))))
    items = [item for item in content.pop("defaults", []) if isinstance(item, Mapping)]
    choices = {str(key).removeprefix("override").strip(" /"): value for item in items for key, value in item.items()}
    return choices | dict(flat(content) if content else ())
