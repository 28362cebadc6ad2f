"""Complete commands and overrides in the shell, with Hydra's own scripts for bash, zsh and fish.

    eval "$(fewbits -sc install=bash)"      in ~/.bashrc; install=fish for fish, and install=bash also for zsh

At each Tab the script runs `fewbits -sc query=bash`, with the command line so far in the environment variable
COMP_LINE. The first word after `fewbits` is completed to a command. Hydra completes the arguments of `fewbits train`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

from fewbits.common.process import environment

LINE = "COMP_LINE"
CONFIG_DIR = ("--config-dir", "-cd")


def complete(arguments: Sequence[str], commands: Sequence[str] = ()) -> None:
    """Print a shell script for the argument `install=SHELL` or `uninstall=SHELL`, or completions for `query=SHELL`.

    commands: the names of fewbits' commands, among which the first word is completed.
    """
    from fewbits.commands.hydra_options import run_hydra

    if len(arguments) != 1 or arguments[0].partition("=")[0] not in ("install", "uninstall", "query"):
        raise ValueError('-sc: install=bash (or fish) is expected, as in eval "$(fewbits -sc install=bash)"')
    if not arguments[0].startswith("query="):
        run_hydra(["--shell-completion", *arguments], [])
        return
    program, _, rest = os.environ.get(LINE, "").lstrip().partition(" ")
    command, space, line = rest.lstrip().partition(" ")
    if not space:
        print(" ".join(name for name in commands if name.startswith(command)))
    elif command == "train":
        _complete_train(line, program, arguments[0])


def _complete_train(line: str, program: str, query: str) -> None:
    """Print the completions of the last word on a command line of `fewbits train`.

    line: the text that was typed so far after `fewbits train `. program: the first word of the command line.
    query: Hydra's argument, such as `query=bash`.
    """
    from fewbits.commands.hydra_options import run_hydra
    from fewbits.experiments.config import prepare
    from fewbits.experiments.config_files import GROUPS, folders, is_search_path, names, with_config_dir

    *before, last = line.split(" ")
    directories = [value for option, value in pairwise(before) if option in CONFIG_DIR]
    overrides = [word for word in before if "=" in word and not word.startswith("-")]
    own = folders(with_config_dir(overrides, directories[-1] if directories else None))
    group, equals, value = last.partition("=")
    if equals and group in GROUPS and not value.startswith((".", "/")):  # Hydra would leave out names like mor/block
        print("\n".join(f"{group}={name}" for name in names(group, own) if name.startswith(value)))
        return
    prepare(own)
    arguments = [*own.overrides, *(text for text in overrides if not is_search_path(text)), last]
    with environment({LINE: " ".join([program, *arguments])}):
        run_hydra(["--shell-completion", query], [])
