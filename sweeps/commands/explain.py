"""Print the fields in which two runs differ, or one run and the current code and config (`fewbits explain`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fewbits.common.arguments import CommandParser
from fewbits.common.store_folder import store_folder

EXAMPLES = """\
examples:
  fewbits explain nemotron-nano-bf16-python-s0-1a2b3c4d 5e6f7a8b     two runs, by folder or by hash
  fewbits explain 1a2b                                               a run and the current sources and overrides
  fewbits explain /mnt/other/runs/nemotron-nano-bf16-python-s0-1a2b3c4d 5e6f7a8b     with a run of another store

The command needs neither the data nor the machine that trained.
"""
STALE = (
    "the run is stale: these source files compute something else than when it ran (their hashes leave out comments, "
    "messages and docstrings); `git diff` shows the change; CONTRIBUTING.md says how to prove that all bits stay equal"
)
LEAST = 4  # the fewest hexadecimal digits of a hash that are accepted as the name of a run


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits explain", __doc__, EXAMPLES)
    parser.add_argument("a", metavar="A", help=f"a run: its folder, or the first {LEAST} or more digits of its hash")
    parser.add_argument("b", nargs="?", metavar="B", help="another run; without it, A as it would be computed now")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="the store (default: runs)")
    options = parser.parse_intermixed_args(argv)
    runs = store_folder(options.runs)

    from fewbits.sweeps.commands.explanation import as_computed, compared_with_today, differences

    a = find_run(options.a, runs)
    if options.b:
        lines, same = differences(as_computed(a), as_computed(find_run(options.b, runs))), "the same trial"
    else:
        lines, same = compared_with_today(a), "the current code computes the same trial"
    print("\n".join(lines) or same)
    if not options.b and any(line.startswith("sources.") for line in lines):
        print(STALE)
    return 0


def find_run(name: str, runs: Path) -> Path:
    """Return the folder of a run. name: its path, its folder in the store `runs`, or the beginning of its hash.

    Raise ValueError if no run or more than one matches.
    """
    for path in (Path(name).expanduser(), runs / name):
        if name and (path / "provenance.json").is_file():
            return path
    if not re.fullmatch(rf"[0-9a-f]{{{LEAST},64}}", name):
        raise ValueError(
            f"no run {name!r} has started in {runs}: name a run folder, or {LEAST} or more digits of its hash"
        )
    paths = sorted(runs.glob("*-*/provenance.json")) if runs.is_dir() else []
    matches = [path.parent for path in paths if _begins(path.parent, name)]
    if not matches:
        raise ValueError(f"no run in {runs} has a hash that begins with {name!r}")
    if len(matches) > 1:
        shown = ", ".join(path.name for path in matches[:3]) + (", …" if len(matches) > 3 else "")
        raise ValueError(
            f"{len(matches)} runs in {runs} have a hash that begins with {name!r}: {shown}: give more digits"
        )
    return matches[0]


def _begins(folder: Path, digits: str) -> bool:
    from fewbits.experiments.storage.run_folder import HASH, opened

    short = folder.name.rpartition("-")[2]
    return short.startswith(digits[:HASH]) and (len(digits) <= HASH or opened(folder).id.startswith(digits))
