"""What the commands of this room share: errors that are one line, help with examples, and where trials run."""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import NoReturn

from fewbits.common.redaction import redacted
from fewbits.common.store_folder import store_folder


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ValueErrors: one line on stderr, without the usage in front of it."""

    def __init__(self, command: str, about: str | None, examples: str) -> None:
        super().__init__(command, description=about, epilog=examples, formatter_class=_formatter)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog.removeprefix('fewbits ')}: {message}")


def existing(runs: str | None) -> str | None:
    """The store that an option names, for what only looks at one: a misspelt one would be empty, or made."""
    if runs is not None and not store_folder(runs).is_dir():
        raise ValueError(f"--runs {runs}: there is no such folder")
    return runs


def warn_in_lines() -> None:
    """Print each warning as one line on stderr from now on."""
    warnings.showwarning = _print_line  # type: ignore[assignment]  # of what it is given, it prints the message alone


def _print_line(message: Warning | str, *_: object) -> None:
    print(f"fewbits: {redacted(' '.join(str(message).split()))}", file=sys.stderr, flush=True)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=110)
