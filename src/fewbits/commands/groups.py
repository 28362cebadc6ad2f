"""List the configs of a Hydra group (`fewbits scales`, `schedules`, `optimizers`, `precisions`, `data`)."""

from __future__ import annotations

from collections.abc import Sequence

from fewbits.common.arguments import CommandParser


def scales(argv: Sequence[str]) -> int:
    return _list("scale", "scales", "smoke", argv)


def schedules(argv: Sequence[str]) -> int:
    return _list("schedule", "schedules", "wsd", argv)


def optimizers(argv: Sequence[str]) -> int:
    return _list("optimizer", "optimizers", "adamw", argv)


def precisions(argv: Sequence[str]) -> int:
    return _list("precision", "precisions", "fp16", argv)


def data(argv: Sequence[str]) -> int:
    return _list("data", "data", "python", argv)


def _list(group: str, command: str, example: str, argv: Sequence[str]) -> int:
    """Run `fewbits COMMAND`: print the names and descriptions of a group's configs, or the settings of one config.

    example: the config in the help's example.
    """
    parser = CommandParser(
        f"fewbits {command}",
        about=f"List the configs that the override {group}=NAME can choose, or the settings of one of them.",
        examples=f"example: fewbits {command} {example}",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="show the settings of this config (or ./FILE.yaml)")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help=f"also list the files of DIR/{group}")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of objects")
    options = parser.parse_args(argv)

    from fewbits.commands.group_listing import print_group

    print_group(group, options.name, options.config_dir, options.json)
    return 0
