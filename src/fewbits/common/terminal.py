"""Show one status line on stderr that the next one replaces, if stderr is a terminal."""

import shutil
import sys


def show(text: str) -> None:
    """Replace the status line."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be erased
        print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)


def clear() -> None:
    """Erase the status line."""
    show("")
