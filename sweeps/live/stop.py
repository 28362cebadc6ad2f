"""Stop running trials at a checkpoint, while other trials of their sweep continue (`fewbits stop`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fewbits.common import terminal
from fewbits.common.arguments import CommandParser

if TYPE_CHECKING:
    from fewbits.experiments.storage.run_folder import RunFolder

EXAMPLES = """\
examples:
  fewbits stop 1a2b3c4d                 end a trial after its current step, with a checkpoint
  fewbits stop 1a2b3c4d 5e6f7a8b --no-wait

The sweep continues with its other trials; running its command again resumes the stopped trials. Ctrl-C in the sweep's
own terminal stops all its trials. A trial of `fewbits train` is stopped in the same way.

Exit status: 0 all have stopped (with --no-wait: all were asked to); 1 one was not running, or did not stop in time."""
PATIENCE = 300.0  # seconds to wait until the trials have stopped: for a step and a checkpoint
POLL = 0.2  # seconds between two checks of the trials


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits stop", __doc__, EXAMPLES)
    parser.add_argument("runs_to_stop", nargs="+", metavar="RUN", help="a run: its folder, its name or its hash")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the trials have stopped")
    parser.add_store()
    options = parser.parse_intermixed_args(argv)

    from fewbits.experiments.storage.run_folder import find_run, opened
    from fewbits.sweeps.planning import store

    folders = [opened(find_run(name, options.runs)) for name in options.runs_to_stop]
    asked = [folder for folder in folders if _ask(folder)]
    if options.no_wait:
        return 0 if len(asked) == len(folders) else 1
    stopped = _wait(asked)
    for folder in asked:
        if folder not in stopped:
            terminal.notice(f"{folder.path.name} still runs after {PATIENCE:.0f} s: it stops after its current step")
        elif folder.over:
            print(f"{folder.path.name} has ended")
        else:
            print(f"{folder.path.name} stopped at step {store.reached(folder)}")
    return 0 if len(stopped) == len(folders) else 1


def _ask(folder: RunFolder) -> bool:
    """Ask the process that trains a trial to stop; return False, and print a line, if no process trains it."""
    from fewbits.experiments.storage.lease import request_stop
    from fewbits.sweeps.planning import store

    if store.holder(folder) is not None:
        request_stop(folder.path)
        return True
    terminal.notice(f"{folder.path.name} is not running: it is {store.state(folder)}")
    return False


def _wait(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """Wait up to PATIENCE seconds until no process trains these trials; return the trials that have stopped."""
    from fewbits.sweeps.planning import store

    until = time.monotonic() + PATIENCE
    while (running := [folder for folder in folders if store.holder(folder) is not None]) and time.monotonic() < until:
        terminal.show(f"waiting for {', '.join(folder.path.name for folder in running)}")
        time.sleep(POLL)
    terminal.clear()
    return [folder for folder in folders if folder not in running]
