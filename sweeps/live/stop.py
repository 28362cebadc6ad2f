"""Stop running trials at a checkpoint, while other trials of their sweep continue (`fewbits stop`)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fewbits.common import terminal
from fewbits.common.arguments import CommandParser

EXAMPLES = """\
examples:
  fewbits stop 1a2b3c4d                 end a trial after its current step, with a checkpoint

The sweep continues with its other trials; running its command again resumes the stopped trials. Ctrl-C in the sweep's
own terminal stops all its trials. A trial of `fewbits train` is stopped in the same way.

Exit status: 0 all have stopped; 1 one was not running, or did not stop in time."""
PATIENCE = 300.0  # seconds to wait until the trials have stopped: for a step and a checkpoint
POLL = 0.2  # seconds between two checks of the trials


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits stop", __doc__, EXAMPLES)
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
