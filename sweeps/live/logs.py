"""Print the log of a sweep's trial; with --follow, also the lines that it writes later (`fewbits logs`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fewbits.common.arguments import CommandParser, existing, positive
from fewbits.common.store_folder import store_folder

EXAMPLES = """\
examples:
  fewbits logs 1a2b3c4d                  the whole log of the trial with this hash
  fewbits logs 1a2b3c4d --follow         also new lines, until the trial ends or Ctrl-C
  fewbits logs runs/RUN --lines 20       the last 20 lines

Only trials of sweeps have logs; `fewbits train` prints to its own terminal."""
POLL = 0.3  # seconds between two reads of the log


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits logs", __doc__, EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run: its folder, its name or its hash")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the trial ends")
    parser.add_argument("-n", "--lines", type=positive, metavar="N", help="begin with the last N lines")
    parser.add_argument("--runs", metavar="DIR", help="the store (default: runs)")
    options = parser.parse_intermixed_args(argv)

    from fewbits.experiments.storage.run_folder import find_run, opened
    from fewbits.sweeps.running import store

    folder = opened(find_run(options.run, store_folder(existing(options.runs) or "runs")))
    path = folder.path / store.LOG
    if not path.is_file():
        raise ValueError(f"{folder.path} has no log: only trials that a sweep has started have one")
    position = _position(path, options.lines)
    for text in _pieces(path, position, lambda: options.follow and store.holder(folder) is not None):
        print(store.plain(text), end="", flush=True)
    return 0


def _position(path: Path, lines: int | None) -> int:
    """Return the position in bytes at which the file's last `lines` lines begin; 0, the start, if `lines` is None."""
    if lines is None:
        return 0
    content = path.read_bytes()
    return len(content) - sum(map(len, content.splitlines(keepends=True)[-lines:]))


def _pieces(path: Path, position: int, goes_on: object) -> Iterator[str]:
    """Yield the file's text from byte `position` on, and then text that is appended, as long as `goes_on()` is true."""
    assert callable(goes_on)
    with path.open("rb") as file:
        file.seek(position)
        while True:
            running = goes_on()  # called before the file is read, so that the last lines are not missed
            if added := file.read():
                yield added.decode(errors="replace")
            if not running:
                return
            time.sleep(POLL)
