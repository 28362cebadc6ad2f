"""Offer Hydra's own options in `fewbits train`, such as `--cfg job`, `--info` and `--config-dir`.

Options that print something are passed on to Hydra's own command line (run_hydra.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fewbits.common.arguments import CommandParser

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_REFUSED = {
    ("--config-path", "-cp"): "fewbits has its own config files; --config-dir DIR adds yours",
    ("--config-name", "-cn"): "the config is always `trial`; put settings of your own into DIR/experiment/NAME.yaml "
    "and add --config-dir DIR +experiment=NAME",
    ("--experimental-rerun",): "the same command runs a trial again, with the same bits",
}


def add_hydra_options(parser: CommandParser) -> None:
    """Add Hydra's options to a command whose positional arguments are overrides."""
    group = parser.add_argument_group("options of Hydra")
    group.add_argument("-c", "--cfg", choices=("job", "hydra", "all"), help="print the composed config, train nothing")
    group.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    group.add_argument("-p", "--package", metavar="KEY", help="with --cfg: print this part, for example recipe")
    group.add_argument("-i", "--info", nargs="?", const="all", choices=INFO, help="print how the config is composed")
    group.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of your own configs, such as DIR/recipe")
    group.add_argument("-sc", "--shell-completion", action="store_true", help='eval "$(fewbits -sc install=bash)"')
    group.add_argument("--hydra-help", action="store_true", help="print Hydra's own help")
    group.add_argument("-r", "--run", action="store_true", help=argparse.SUPPRESS)  # what `fewbits train` does anyway
    for names in _REFUSED:
        group.add_argument(*names, action=_Refuse, nargs="?", help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    """An option of Hydra that fewbits refuses: its use raises ValueError with advice on what to do instead."""

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        raise ValueError(f"train: {option_string}: {_REFUSED[tuple(self.option_strings)]}")


def show(options: argparse.Namespace, overrides: Sequence[str]) -> bool:
    """Let Hydra print what options such as --cfg or --info request; return whether one of them was given.

    If one was given, the command has to end without training.
    """
    if options.shell_completion:
        from fewbits.commands.run_hydra import complete

        complete(overrides)
        return True
    if options.cfg is None and (options.resolve or options.package):
        raise ValueError("train: --resolve and --package need --cfg, as in --cfg job --resolve")
    if options.cfg and options.info:
        raise ValueError("train: --cfg and --info cannot be combined: choose one of them")
    arguments = [
        *(["--cfg", options.cfg] if options.cfg else []),
        *(["--resolve"] if options.resolve else []),
        *(["--package", options.package] if options.package else []),
        *(["--info", options.info] if options.info else []),
        *(["--hydra-help"] if options.hydra_help else []),
    ]
    if arguments:
        from fewbits.commands.run_hydra import run_hydra

        run_hydra(arguments, overrides)
    return bool(arguments)
