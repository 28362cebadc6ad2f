"""List the states of a sweep's trials, read from the store (`fewbits status`)."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.commands.sweep import in_store
from fewbits.common.arguments import CommandParser, existing
from fewbits.common.store_folder import store_folder
from fewbits.common.tables import print_table
from fewbits.common.wording import plural

if TYPE_CHECKING:
    from fewbits.sweeps.planning.lookup import FoundPlan
    from fewbits.sweeps.running.store import State

EXAMPLES = """\
examples:
  fewbits status study=mor scale=smoke
  fewbits status my-sweep.yaml --json
  fewbits status my-sweep.yaml --watch                       its progress bars, until all trials have ended
  fewbits status                                             all sweeps of the store
  fewbits status multirun-1a2b3c4d                           a multirun, by the name that it printed
  fewbits status -m recipe.threshold=0.03,0.045 seed=0,1     a multirun, by the arguments of its `fewbits train -m`
"""


WIDTH = 60  # the largest width of a column in the list of sweeps, in characters


@dataclass(frozen=True)
class Row:
    """The state of the trial at one place of a sweep: a row of the printed table, or a JSON object with `--json`."""

    sweep: str
    place: dict[str, str]  # arm, axes and seed, with their values
    folder: str  # the name of the run folder
    state: State
    step: int  # a running trial's current step, a finished trial's last step, else the step of the newest checkpoint
    steps: int  # the trial's number of training steps
    note: str = ""  # why the trial failed or is blocked, or which stale or other run exists at this place
    kind: str | None = None  # the kind of processor or GPU that computed it, `A, then B` if several; None: unknown


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits status", __doc__, EXAMPLES)
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="the sweep, as for `fewbits sweep`; if left out, list sweeps"
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="the overrides are those of a `fewbits train -m`")
    parser.add_argument("--runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="your own configs, such as DIR/sweep/NAME.yaml")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    parser.add_argument("--watch", action="store_true", help="show the progress until all trials have ended")
    options = parser.parse_intermixed_args(argv)
    overrides = in_store(options.overrides, existing(options.runs))
    if options.watch and (options.json or not options.overrides):
        raise ValueError("status: --watch needs the name of a sweep, and cannot be used with --json")
    if not options.overrides:
        _print_sweeps(store_folder(options.runs or "runs"), options.json)
        return 0

    from fewbits.experiments.config_files import with_config_dir
    from fewbits.sweeps.planning.lookup import find_plan, show_notes
    from fewbits.sweeps.planning.multiruns import multirun_name
    from fewbits.sweeps.planning.overrides import is_location

    if options.multirun:
        overrides = [multirun_name(options.overrides), *filter(is_location, overrides)]
    overrides = with_config_dir(overrides, options.config_dir)
    selected = find_plan(overrides)
    show_notes(selected.notes)
    if options.watch:
        from fewbits.sweeps.live.watch import watch

        watch(lambda: find_plan(overrides).plan)
    rows = rows_of(selected)
    if options.json:
        print(json.dumps([vars(row) for row in rows], indent=2))
        return 0
    from fewbits.sweeps.planning.expand import spell
    from fewbits.sweeps.running.trial_status import counted

    kinds = {row.kind for row in rows if row.kind}
    cells = [[row.sweep, spell(row.place), row.folder, _progress(row), row.kind or "", row.note] for row in rows]
    shown = [number for number in range(6) if number != 4 or len(kinds) > 1]
    print_table([""] * len(shown), ([row[number] for number in shown] for row in cells))
    distinct = {row.folder: row for row in rows}
    half_done = sum(row.state == "planned" and row.step > 0 for row in distinct.values())
    print(f"\n{plural(len(distinct), 'trial')}: {counted((row.state for row in distinct.values()), half_done)}")
    return 0


def _print_sweeps(runs: Path, as_json: bool) -> None:
    """Print a row for each stored plan of the store `runs`, the newest first.

    A row has the overrides of the sweep, its axes, the time when the plan was stored, and the number of trials in each
    state. as_json: print JSON objects instead of a table.
    """
    from fewbits.sweeps.planning.stored_plans import stored_plans
    from fewbits.sweeps.running.trial_status import counted, half_done, trial_statuses

    sweeps = []
    for stored in stored_plans(runs):
        statuses = trial_statuses(stored.plan)
        states = counted((status.state for status in statuses.values()), half_done(stored.plan, statuses))
        axes = dict.fromkeys(axis for sweep in stored.plan.sweeps for group in sweep.groups for axis in group)
        shown = {"sweep": shlex.join(stored.overrides), "axes": ", ".join(axes)}
        sweeps.append(shown | {"planned": stored.time, "trials": states})
    if as_json:
        print(json.dumps(sweeps, indent=2))
    elif sweeps:
        rows = [[textwrap.shorten(cell, WIDTH, placeholder=" …") for cell in sweep.values()] for sweep in sweeps]
        print_table(tuple(sweeps[0]), rows)
    else:
        single = sum(1 for _ in runs.glob("*/config.yaml"))
        others = f"; it has {plural(single, 'single run')}, which `fewbits ui` shows" if single else ""
        print(f"no sweep has run in {runs}{others}")


def _progress(row: Row) -> str:
    from fewbits.sweeps.running.trial_status import HALF_DONE

    if row.state == "planned":
        return f"{HALF_DONE} {row.step}/{row.steps}" if row.step else "planned"
    return row.state if row.state == "blocked" else f"{row.state} {row.step}/{row.steps}"


def rows_of(selected: FoundPlan) -> list[Row]:
    """Return a row for each place of the plan, with the present state of its trial; a trial may have several places."""
    from fewbits.experiments.identity import is_current
    from fewbits.experiments.machine_kinds import kind
    from fewbits.experiments.storage.run_folder import HASH
    from fewbits.sweeps.planning.stored_plans import place_of
    from fewbits.sweeps.running import store
    from fewbits.sweeps.running.trial_status import explain_hint, stale_note, trial_statuses

    rows, statuses = [], trial_statuses(selected.plan)
    for member in selected.plan.members:
        trial = selected.plan.trials[member.id]
        folder, state, note = trial.folder, statuses[member.id].state, statuses[member.id].why
        earlier = selected.earlier.get(place_of(member))
        if state in store.OVER and not is_current(folder.provenance() or {}):
            note = f"computed by another version of the code; {explain_hint(folder, folder.id[:HASH])}"
        elif state is store.State.PLANNED and earlier is not None:
            note = stale_note(trial, earlier)
        live: dict[str, Any] = store.progress(folder) or {}
        result = (folder.result() if state in store.OVER else None) or {}
        step = int(result.get("step", max(live.get("step", 0) if state == "running" else 0, store.reached(folder))))
        steps = trial.trial.training.steps
        rows.append(Row(member.cell.sweep, member.cell.place, folder.path.name, state, step, steps, note, kind(folder)))
    return rows
