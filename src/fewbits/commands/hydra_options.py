"""Offer Hydra's own options in `fewbits train`, such as `--cfg job`, `--info` and `--config-dir`.

Options that print something, and multiruns, are passed on to Hydra's own command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fewbits.common.arguments import CommandParser
from fewbits.common.process import environment

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
        from fewbits.commands.completion import complete

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
        run_hydra(arguments, overrides)
    return bool(arguments)


def run_hydra(options: Sequence[str], overrides: Sequence[str]) -> None:
    """Run Hydra's command line with Hydra's options and the overrides; Hydra's errors become one-line ValueErrors."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from fewbits.experiments.composition import in_one_line
    from fewbits.experiments.config import prepare
    from fewbits.experiments.config_files import FOLDER, ROOT, folders, is_search_path, with_globs

    own = folders(overrides)
    overrides = [with_globs(text, own) for text in overrides]
    _check(overrides)
    prepare(own)
    passed = [*own.overrides, *(text for text in overrides if not is_search_path(text))]
    try:
        with _arguments(*options, *passed):
            hydra.main(str(FOLDER), ROOT, version_base=None)(lambda _: None)()  # a launcher runs the trials, not this
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(in_one_line(error)) from error
    except SystemExit as error:  # after --hydra-help, with status 0
        if error.code:
            raise ValueError(
                f"train: Hydra does not accept {' '.join((*options, *overrides))}; its message above says why"
            ) from None


def _check(overrides: Sequence[str]) -> None:
    """Raise ValueError, with the valid choices, if an override has an unknown key or names an unknown config.

    This check comes before Hydra's own, whose errors do not list all valid choices. Of several values of a key that is
    no group, only the first is checked.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from fewbits.experiments.composition import override_values
    from fewbits.experiments.config import is_hydra_setting, resolved
    from fewbits.experiments.config_files import GROUPS, check_choice, folders, is_search_path

    own, single = folders(overrides), []
    for text in overrides:
        values, key = override_values(text), text.partition("=")[0]
        if key in GROUPS:
            for value in values:
                check_choice(key, value, own)
        if values and (is_search_path(text) or not is_hydra_setting(key)):
            override = OverridesParser.create().parse_override(text)
            swept = override.is_sweep_override()
            single.append(f"{key}={next(override.sweep_string_iterator())}" if swept else text)
    resolved(single)


@contextmanager
def _arguments(*arguments: str) -> Iterator[None]:
    """Make `hydra.main`, inside the `with` block, read these arguments and raise errors instead of printing them."""
    from hydra.core.global_hydra import GlobalHydra

    outer = sys.argv, GlobalHydra.instance().hydra
    sys.argv = [sys.argv[0], *arguments]
    GlobalHydra.instance().clear()
    try:
        with environment({"HYDRA_FULL_ERROR": "1"}):
            yield
    finally:
        sys.argv, GlobalHydra.instance().hydra = outer
