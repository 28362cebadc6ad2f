"""List the states of a sweep's trials, or print the end of a trial's log, from the store (`fewbits status`)."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from fewbits.commands.sweep import in_store
from fewbits.common.arguments import CommandParser, positive
from fewbits.common.terminal import print_json, print_table
from fewbits.common.wording import plural

EXAMPLES = """\
examples:
  fewbits status                                 all sweeps of the store
  fewbits status study=mor scale=smoke           the trials of a sweep
  fewbits status my-sweep.yaml --json
  fewbits status my-sweep.yaml --watch           its progress bars, until all trials have ended
  fewbits status multirun-1a2b3c4d               a multirun, by the name that it printed
  fewbits status 1a2b3c4d                        the end of the log of the trial with this hash
  fewbits status runs/RUN --follow --lines 100   also new lines, until the trial ends or Ctrl-C

Only trials of sweeps have logs; `fewbits train` prints to its own terminal."""
WIDTH = 60  # the largest width of a column in the list of sweeps, in characters
LINES = 20


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits status", __doc__, EXAMPLES)
    chosen = "a sweep, as for `fewbits sweep`, or a run: its folder, name or hash (default: list all sweeps)"
    parser.add_argument("overrides", nargs="*", metavar="SWEEP or RUN", help=chosen)
    parser.add_store()
    parser.add_config_dir()
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    parser.add_argument("--watch", action="store_true", help="show a sweep's progress until all trials have ended")
    parser.add_argument("-f", "--follow", action="store_true", help="print a run's log until the trial ends")
    parser.add_argument("-n", "--lines", type=positive, metavar="N", help=f"lines of a run's log (default: {LINES})")
    options = parser.parse_intermixed_args(argv)
    if options.watch and (options.json or not options.overrides):
        raise ValueError("status: --watch needs the name of a sweep, and cannot be used with --json")
    runs: Path = options.runs
    if not options.overrides:
        _print_sweeps(runs, options.json)
        return 0

    from fewbits.experiments.config_files import with_config_dir
    from fewbits.experiments.storage.run_folder import find_run, opened
    from fewbits.sweeps.planning.store import counted, trial_statuses
    from fewbits.sweeps.planning.stored_plans import find_plan, load_plan, stored_plans
    from fewbits.sweeps.planning.sweep import spell
    from fewbits.sweeps.running.progress import log, rows_of, watch

    (name, *others), for_run = options.overrides, options.follow or options.lines
    a_name = not others and "=" not in name and not name.endswith((".yaml", ".yml"))
    if a_name and (for_run or load_plan(runs, [name]) is None):  # a name with a plan is that of a multirun
        try:
            folder = opened(find_run(name, runs))
        except ValueError as error:
            known = [each.overrides[0] for each in stored_plans(runs) if "=" not in each.overrides[0]]
            raise ValueError(f"{error}; sweeps: {', '.join(known)}" if known else error) from None
        for text in log(folder, options.lines or LINES, options.follow):
            print(text, end="", flush=True)
        return 0
    if for_run:
        raise ValueError("status: --follow and --lines print the log of one run: name it by its folder, name or hash")
    overrides = with_config_dir(in_store(options.overrides, options.runs), options.config_dir)
    plan = find_plan(overrides)
    if options.watch:
        watch(lambda: find_plan(overrides))
    rows = rows_of(plan)
    if options.json:
        print_json([vars(row) for row in rows])
        return 0
    kinds = {row.kind for row in rows if row.kind}
    cells = [[row.sweep, spell(row.place), row.folder, row.progress, row.kind or "", row.note] for row in rows]
    shown = [number for number in range(6) if number != 4 or len(kinds) > 1]
    print_table([""] * len(shown), ([row[number] for number in shown] for row in cells))
    print(f"\n{plural(len(plan.trials), 'trial')}: {counted(plan, trial_statuses(plan))}")
    return 0


def _print_sweeps(runs: Path, as_json: bool) -> None:
    """Print a row for each stored plan, the newest first: its overrides, axes, time and trials by state."""
    from fewbits.common.terminal import notice
    from fewbits.sweeps.planning.store import counted, trial_statuses
    from fewbits.sweeps.planning.stored_plans import stored_plans

    sweeps = []
    for stored in stored_plans(runs, notice):
        states = counted(stored.plan, trial_statuses(stored.plan))
        axes = dict.fromkeys(axis for sweep in stored.plan.sweeps for group in sweep.groups for axis in group)
        shown = {"sweep": shlex.join(stored.overrides), "axes": ", ".join(axes)}
        sweeps.append(shown | {"planned": stored.time, "trials": states})
    if as_json:
        print_json(sweeps)
    elif sweeps:
        rows = [[textwrap.shorten(cell, WIDTH, placeholder=" …") for cell in sweep.values()] for sweep in sweeps]
        print_table(tuple(sweeps[0]), rows)
    else:
        single = sum(1 for _ in runs.glob("*/metrics.parquet"))
        others = f"; it has {plural(single, 'single run')}, which `fewbits ui` shows" if single else ""
        print(f"no sweep has run in {runs}{others}")
