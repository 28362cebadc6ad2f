"""Run Hydra's own command line on the config of trials, for multiruns and for `--cfg`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fewbits.common.arguments import CommandParser
from fewbits.common.process import environment


def add_hydra_options(parser: CommandParser) -> None:
    """Add Hydra's options to a command whose positional arguments are overrides."""
    group = parser.add_argument_group("options of Hydra")
    group.add_argument("-c", "--cfg", choices=("job", "hydra", "all"), help="print the composed config, train nothing")
    group.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    group.add_argument("-p", "--package", metavar="KEY", help="with --cfg: print this part, for example recipe")
    parser.add_config_dir()


def show_config(options: argparse.Namespace, overrides: Sequence[str]) -> bool:
    """Let Hydra print the config if `--cfg` was given, and return whether it was: then the command must not train."""
    if options.cfg is None and (options.resolve or options.package):
        raise ValueError("train: --resolve and --package need --cfg, as in --cfg job --resolve")
    if options.cfg:
        package = ["--package", options.package] if options.package else []
        run_hydra(["--cfg", options.cfg, *["--resolve"] * options.resolve, *package], overrides)
    return bool(options.cfg)


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
    except SystemExit as error:
        if error.code:
            passed = [*options, *overrides]
            raise ValueError(f"train: Hydra does not accept {' '.join(passed)}; its message is above") from None


def _check(overrides: Sequence[str]) -> None:
    """Raise ValueError for an unknown key or config; unlike Hydra's own errors, it lists all valid choices.

    Of several values of a key that is no group, only the first is checked.
    """
    from fewbits.experiments.composition import override_values, read_override
    from fewbits.experiments.config import is_hydra_setting, resolved
    from fewbits.experiments.config_files import GROUPS, check_choice, folders, is_search_path

    own, single = folders(overrides), []
    for text in overrides:
        values, key = override_values(text), text.partition("=")[0]
        for value in values if key in GROUPS else ():
            check_choice(key, value, own)
        if values and (is_search_path(text) or not is_hydra_setting(key)):
            override = read_override(text)
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
