"""Run Hydra's own command line on the config of trials, for multiruns and for options that print a config.

Hydra reads its arguments from sys.argv, which `run_hydra` replaces while it runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fewbits.common.process import environment
from fewbits.experiments.composition import override_values
from fewbits.experiments.config import about_key, in_one_line, prepare
from fewbits.experiments.config_files import (
    FOLDER,
    GROUPS,
    ROOT,
    check_choice,
    folders,
    is_search_path,
    with_globs,
    with_names,
)
from fewbits.experiments.hydra_settings import is_hydra_setting


def run_hydra(options: Sequence[str], overrides: Sequence[str]) -> None:
    """Run Hydra's command line with Hydra's options and the overrides; Hydra's errors become one-line ValueErrors."""
    prepare()
    searched = folders(overrides)
    overrides = [with_globs(text, searched) for text in overrides]
    check_overrides(overrides)
    own = searched.overrides
    passed = [with_names(text) for text in overrides if not is_search_path(text)]
    try:
        with _arguments(*options, *own, *passed):
            hydra.main(str(FOLDER), ROOT, version_base=None)(_unused)()
    except (HydraException, OmegaConfBaseException) as error:
        single = [text for text in overrides if not is_hydra_setting(text) and not re.search(r"[,(]", text)]
        raise ValueError(in_one_line(error, [*own, *single]).partition(" Config search path:")[0]) from error
    except SystemExit as error:  # after --hydra-help, with status 0
        if error.code:
            raise ValueError(
                f"train: Hydra does not accept {' '.join((*options, *overrides))}; its message above says why"
            ) from None


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise ValueError, with the valid choices, if an override has an unknown key or names an unknown config.

    This check comes before Hydra's own, whose errors do not list all valid choices.
    """
    own = folders(overrides)
    for text in overrides:
        values = override_values(text)
        override = OverridesParser.create().parse_override(text)
        key = override.key_or_group
        if key in GROUPS and override.package is None and not override.is_delete():
            for value in values:
                check_choice(key, value, own)
        elif override.type != OverrideType.CHANGE or re.split(r"\W", key)[0] in (*GROUPS, "hydra"):
            continue
        elif (complaint := about_key(key, [*filter(is_search_path, overrides)])) is not None:
            raise ValueError(complaint)


@contextmanager
def _arguments(*arguments: str) -> Iterator[None]:
    """Make `hydra.main`, inside the `with` block, read these arguments and raise errors instead of printing them."""
    outer = sys.argv, GlobalHydra.instance().hydra
    sys.argv = [sys.argv[0], *arguments]
    GlobalHydra.instance().clear()
    try:
        with environment({"HYDRA_FULL_ERROR": "1"}):
            yield
    finally:
        sys.argv, GlobalHydra.instance().hydra = outer


def _unused(config: object) -> None:
    """Do nothing: Hydra requires a task function, but here Hydra only prints, or a launcher runs the trials."""
