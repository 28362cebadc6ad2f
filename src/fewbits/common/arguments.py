"""Define the argument parser that all commands use, and checks of values for options that several commands have."""

from __future__ import annotations

import argparse
import textwrap
import warnings
from pathlib import Path
from typing import NoReturn

from fewbits.common.store_folder import store_folder
from fewbits.common.terminal import notice

WIDTH = 110  # characters of a line of help


class CommandParser(argparse.ArgumentParser):
    """A parser of a command's options. For wrong options it raises a ValueError, which `cli.py` prints as one line."""

    def __init__(self, command: str, about: str | None, examples: str | None = None) -> None:
        super().__init__(command, description=_wrapped(about), epilog=_wrapped(examples), formatter_class=_formatter)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog.removeprefix('fewbits ')}: {message}")

    def add_store(self, new: bool = False) -> None:
        """Add the option --runs, whose value is a path; new: whether the command may create the store.

        A command that only reads a store refuses a folder that does not exist, since its name may be mistyped.
        """

        def kind(text: str) -> Path:
            try:
                path = store_folder(text)
            except ValueError as error:
                raise argparse.ArgumentTypeError(str(error)) from None
            if not new and not path.is_dir():
                raise argparse.ArgumentTypeError(f"{text}: no such folder")
            return path

        self.add_argument("--runs", metavar="DIR", type=kind, default=Path("runs"), help="the store (default: runs)")

    def add_device(self) -> None:
        """Add the options --device (where to compute) and --threads (of the CPU)."""
        devices = ("auto", "cpu", "cuda")
        self.add_argument("--device", default="auto", choices=devices, help="where to compute (default: %(default)s)")
        self.add_argument("--threads", type=positive, default=1, help="threads on a CPU (default: %(default)s)")

    def add_config_dir(self) -> None:
        """Add the option --config-dir, a folder of the user's own configs."""
        about = "a folder of your own configs, such as DIR/recipe/NAME.yaml"
        self.add_argument("-cd", "--config-dir", metavar="DIR", help=about)

    def add_cache(self) -> None:
        """Add the option --cache, the folder of prepared data."""
        self.add_argument("--cache", metavar="DIR", help="the folder of prepared data (default: the user's cache)")


def positive(text: str) -> int:
    """Return the whole number ≥ 1 that an option's text is."""
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number ≥ 1")
    return int(text)


def warn_in_lines() -> None:
    """Make Python print each later warning as one line on stderr, without the source line that raised it."""
    warnings.showwarning = lambda message, *_: notice(message)


def _wrapped(text: str | None) -> str | None:
    """Break a one-line text into lines of at most WIDTH characters; return other texts, and None, unchanged."""
    return text if text is None or "\n" in text.strip() else textwrap.fill(text, WIDTH)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=WIDTH)
