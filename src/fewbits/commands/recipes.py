"""List the recipes with the quantizers of their six operand slots and their settings (`fewbits recipes`)."""

from __future__ import annotations

from collections.abc import Sequence

from fewbits.common.arguments import CommandParser


def main(argv: Sequence[str]) -> int:
    parser = CommandParser(
        "fewbits recipes",
        about="List recipes with the quantizer of each operand of the three GEMMs, or one recipe with its settings.",
        examples="example: fewbits recipes nvfp4, then fewbits train recipe=nvfp4 recipe.rht=32",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this recipe only: mor/block, or ./mine.yaml")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="also list the recipes of DIR/recipe")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of objects")
    options = parser.parse_args(argv)

    from fewbits.commands.recipe_listing import print_recipes

    print_recipes(options.name, options.config_dir, options.json)
    return 0
