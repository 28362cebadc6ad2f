"""List what can be removed from a store, and how much space that frees; remove it with --delete (`fewbits prune`)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fewbits.common.arguments import CommandParser
from fewbits.common.from_dict import one_of
from fewbits.common.store_folder import runs_option
from fewbits.common.terminal import print_table

KINDS = {
    "leftovers": "unfinished files of processes that were killed",
    "checkpoints": "of trials that have ended: all but the last checkpoint and those from which branches start",
    "stale": "whole runs that another version of the code computed, and that no stored plan and no other run needs",
}
NAMED_ONLY = ("stale",)  # kinds that are listed only if the command names them, since their removal loses results
EXAMPLES = """\
examples:
  fewbits prune                          list what can be removed; remove nothing
  fewbits prune --delete                 remove it
  fewbits prune stale                    list runs of older versions of the code (only if `stale` is given)
  fewbits prune checkpoints --delete     remove only checkpoints

kinds:
""" + "\n".join(f"  {kind:12} {about}" for kind, about in KINDS.items())


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits prune", __doc__, EXAMPLES)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"only these kinds: {', '.join(KINDS)}")
    parser.add_argument("--delete", action="store_true", help="remove what is listed")
    parser.add_argument("--json", action="store_true", help="print a JSON list of objects")
    parser.add_store()
    options = parser.parse_intermixed_args(argv)

    from fewbits.common.store_folder import free_bytes, size
    from fewbits.sweeps.live.removable import removable, remove

    for kind in options.kinds:
        one_of("prune", kind, KINDS)
    runs = options.runs
    kinds = options.kinds or [kind for kind in KINDS if kind not in NAMED_ONLY]
    items = [(item, item.bytes) for item in removable(runs) if item.kind in kinds]
    if options.delete:
        items = [(item, count) for item, count in items if remove(item)]
    if options.json:
        rows = [{"kind": item.kind, "path": str(item.path), "bytes": count} for item, count in items]
        print(json.dumps(rows, indent=2))
        return 0
    shown = ((item.kind, str(item.path.relative_to(runs)), size(count)) for item, count in items)
    if items:
        print_table(("kind", "path", "size"), shown, right=("size",))
        print()
    total = size(sum(count for _, count in items))
    if options.delete:
        print(f"{len(items)} removed, {total} freed; {size(free_bytes(runs))} are free now")
    else:
        again = f"; `fewbits prune{''.join(f' {kind}' for kind in options.kinds)} --delete{runs_option(runs)}` removes"
        print(f"{len(items)} can be removed, which frees {total}" + (f"{again} them" if items else ""))
    return 0
