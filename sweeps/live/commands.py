"""Stop running trials at a checkpoint (`fewbits stop`), and remove what a store does not need (`fewbits prune`)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from fewbits.common import terminal
from fewbits.common.arguments import CommandParser
from fewbits.common.from_dict import one_of
from fewbits.common.store_folder import runs_option
from fewbits.common.terminal import print_table

STOP = """\
examples:
  fewbits stop 1a2b3c4d                 end a trial after its current step, with a checkpoint

The sweep continues with its other trials; running its command again resumes the stopped trials. Ctrl-C in the sweep's
own terminal stops all its trials. A trial of `fewbits train` is stopped in the same way.

Exit status: 0 all have stopped; 1 one was not running, or did not stop in time."""
PATIENCE = 300.0  # seconds to wait until the trials have stopped: for a step and a checkpoint
POLL = 0.2  # seconds between two checks of the trials
KINDS = {
    "leftovers": "unfinished files of processes that were killed",
    "checkpoints": "of trials that have ended: all but the last checkpoint and those from which branches start",
    "stale": "whole runs that another version of the code computed, and that no stored plan and no other run needs",
}
NAMED_ONLY = ("stale",)  # kinds that are listed only if the command names them, since their removal loses results
PRUNE = """\
examples:
  fewbits prune                          list what can be removed; remove nothing
  fewbits prune --delete                 remove it
  fewbits prune stale                    list runs of older versions of the code (only if `stale` is given)
  fewbits prune checkpoints --delete     remove only checkpoints

kinds:
""" + "\n".join(f"  {kind:12} {about}" for kind, about in KINDS.items())


def stop(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits stop", "Stop running trials at a checkpoint; other trials continue.", STOP)
    parser.add_argument("runs_to_stop", nargs="+", metavar="RUN", help="a run: its folder, its name or its hash")
    parser.add_store()
    options = parser.parse_intermixed_args(argv)

    from fewbits.experiments.storage.lease import request_stop
    from fewbits.experiments.storage.run_folder import find_run, opened
    from fewbits.sweeps.planning import store

    folders = [opened(find_run(name, options.runs)) for name in options.runs_to_stop]
    asked = [folder for folder in folders if store.holder(folder) is not None]
    for folder in folders:
        if folder in asked:
            request_stop(folder.path)
        else:
            terminal.notice(f"{folder.path.name} is not running: it is {store.state(folder)}")
    until = time.monotonic() + PATIENCE
    while (running := [folder for folder in asked if store.holder(folder) is not None]) and time.monotonic() < until:
        terminal.show(f"waiting for {', '.join(folder.path.name for folder in running)}")
        time.sleep(POLL)
    terminal.clear()
    for folder in asked:
        if folder in running:
            terminal.notice(f"{folder.path.name} still runs after {PATIENCE:.0f} s: it stops after its current step")
        else:
            end = "has ended" if folder.over else f"stopped at step {store.reached(folder)}"
            print(f"{folder.path.name} {end}")
    return 0 if len(asked) == len(folders) and not running else 1


def prune(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits prune", "List what can be removed from a store; remove it with --delete.", PRUNE)
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
