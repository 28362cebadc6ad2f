"""Print the differences between two runs, or between a run and what the code would compute now (`fewbits explain`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fewbits.common.arguments import CommandParser
from fewbits.common.store_folder import store_folder

EXAMPLES = """\
examples:
  fewbits explain nemotron-nano-bf16-python-s0-1a2b3c4d 5e6f7a8b     two runs, by folder or by hash
  fewbits explain 1a2b                                               a run and the current sources and sweep file
  fewbits explain /mnt/other/runs/1a2b3c4d 5e6f7a8b                  a run of another store, by path, and one of this

The command works on any machine that has access to the store, without the training data.
"""
STALE = (
    "the run is stale: other sources computed it, so its bits may differ now; after an edit, undo the edit to find the "
    "run again (comments, messages and docstrings do not count)"
)


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits explain", __doc__, EXAMPLES)
    parser.add_argument("a", metavar="A", help="a run: its folder, or the first 4 or more digits of its hash")
    parser.add_argument(
        "b", nargs="?", metavar="B", help="another run; without it, A is compared with what would be computed now"
    )
    parser.add_argument("--runs", metavar="DIR", default="runs", help="the store (default: runs)")
    options = parser.parse_intermixed_args(argv)
    runs = store_folder(options.runs)

    from fewbits.commands.explanation import (
        as_computed,
        compared_with_today,
        data_differences,
        recipe_differences,
    )
    from fewbits.common.wording import differences
    from fewbits.experiments.storage.run_folder import find_run

    a = find_run(options.a, runs)
    _print_name(options.a, a)
    if options.b:
        b = find_run(options.b, runs)
        _print_name(options.b, b)
        lines, same = differences(as_computed(a), as_computed(b)), "the same trial"
        if lines:
            lines = [*recipe_differences(a, b), *data_differences(a, b), *lines]
    else:
        lines, same = compared_with_today(a), "the current code computes the same trial"
    print("\n".join(lines) or same)
    if not options.b and any(line.startswith(("numerics version", "edited source")) for line in lines):
        print(STALE)
    return 0


def _print_name(argument: str, run: Path) -> None:
    """Print `ARGUMENT: NAME` if `argument`, with which the user selected the run, does not contain the run's name."""
    if run.name not in argument:
        print(f"{argument}: {run.name}")
