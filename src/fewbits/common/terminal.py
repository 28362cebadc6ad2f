"""Print lines on stderr: permanent notices and, on a terminal, a status line that can be replaced and erased."""

import shutil
import sys

from fewbits.common.redaction import redacted


def notice(text: object) -> None:
    """Print the text as one line on stderr, after `fewbits: `, with credentials replaced by `***`."""
    print(f"fewbits: {redacted(' '.join(str(text).split()))}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Replace the status line by this text, cut to the terminal's width; do nothing if stderr is no terminal."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1  # a text of several lines could not be erased
        print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)


def clear() -> None:
    """Erase the status line."""
    show("")
