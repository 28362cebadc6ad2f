"""Define the argument parser that all commands use, and checks of values for options that several commands have."""

from __future__ import annotations

import argparse
import textwrap
import warnings
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


def existing(runs: str | None) -> str | None:
    """Return the value of `--runs`, which may be None; raise ValueError if it names a folder that does not exist.

    Commands that only read a store call this function, so that a mistyped name does not create a new store.
    """
    if runs is not None and not store_folder(runs).is_dir():
        raise ValueError(f"--runs {runs}: no such folder")
    return runs


def positive(text: str) -> int:
    """Return an option's text as a whole number ≥ 1; raise ArgumentTypeError for any other text."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """Return an option's text as a whole number ≥ 0; raise ArgumentTypeError for any other text."""
    return _at_least(0, text)


def _at_least(lowest: int, text: str) -> int:
    if not text.isdecimal() or int(text) < lowest:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number ≥ {lowest}")
    return int(text)


def runtime_options(parser: argparse.ArgumentParser) -> None:
    """Add the options --device (where to compute), --threads (of the CPU) and --cache (the folder of prepared data)."""
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to compute (default: %(default)s)"
    )
    parser.add_argument("--threads", type=positive, default=1, help="threads on a CPU (default: %(default)s)")
    parser.add_argument("--cache", metavar="DIR", help="the folder of prepared data (default: the user's cache)")


def warn_in_lines() -> None:
    """Make Python print each later warning as one line on stderr, without the source line that raised it."""
    warnings.showwarning = lambda message, *_: notice(message)


def _wrapped(text: str | None) -> str | None:
    """Break a one-line text into lines of at most WIDTH characters; return other texts, and None, unchanged."""
    return text if text is None or "\n" in text.strip() else textwrap.fill(text, WIDTH)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=WIDTH)
