"""One line on stderr, written over by the next one, where that is a terminal; nothing else."""

import shutil
import sys


def show(text: str) -> None:
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1  # a longer one would not go away
        print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)


def clear() -> None:
    show("")
