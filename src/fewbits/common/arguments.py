"""Define the argument parser that all commands use, and checks of options that several commands have."""

from __future__ import annotations

import argparse
import textwrap
import warnings
from typing import NoReturn

from fewbits.common.store_folder import store_folder
from fewbits.common.terminal import notice

WIDTH = 110


class CommandParser(argparse.ArgumentParser):
    """The parser of a command's options. It raises ValueError for wrong options, which the user sees as one line."""

    def __init__(self, command: str, about: str | None, examples: str | None = None) -> None:
        super().__init__(command, description=_wrapped(about), epilog=_wrapped(examples), formatter_class=_formatter)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog.removeprefix('fewbits ')}: {message}")


def existing(runs: str | None) -> str | None:
    """Return the store that the option `--runs` names; raise ValueError if it does not exist.

    So a command that only reads does not create a store if the user mistypes its name.
    """
    if runs is not None and not store_folder(runs).is_dir():
        raise ValueError(f"--runs {runs}: no such folder")
    return runs


def positive(text: str) -> int:
    """Return an option's value as a whole number of 1 or more; raise ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number ≥ 1")
    return int(text)


def runtime_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for where a command computes and where it finds its data."""
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: %(default)s")
    parser.add_argument("--threads", type=positive, default=1, help="threads on a CPU (default: %(default)s)")
    parser.add_argument("--cache", metavar="DIR", help="folder of corpora (default: the user's cache)")


def warn_in_lines() -> None:
    """Print each warning as one line on stderr from now on."""
    warnings.showwarning = lambda message, *_: notice(message)


def _wrapped(text: str | None) -> str | None:
    """Break one long line into several lines; leave text that has line breaks as it is."""
    return text if text is None or "\n" in text.strip() else textwrap.fill(text, WIDTH)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=WIDTH)
