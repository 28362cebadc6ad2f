"""What the commands of this room share: errors that are one line, help with examples, and where trials run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ValueErrors: one line on stderr, without the usage in front of it."""

    def __init__(self, command: str, about: str | None, examples: str) -> None:
        super().__init__(command, description=about, epilog=examples, formatter_class=_formatter)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog.removeprefix('fewbits ')}: {message}")


def existing(runs: str | None) -> str | None:
    """The store that an option names, for what only looks at one: a misspelt one would be empty, or made."""
    if runs is not None and not Path(runs).expanduser().is_dir():
        raise ValueError(f"--runs {runs}: there is no such folder")
    return runs


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, width=110)
