"""`fewbits status`: how the trials of a sweep stand, read from the store."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fewbits.sweeps.command_line import Parser
from fewbits.sweeps.sweep_command import in_store

EXAMPLES = """\
examples:
  fewbits status study=mor scale=smoke
  fewbits status my-sweep.yaml --json
"""


@dataclass(frozen=True)
class Standing:
    """How one place of a sweep stands."""

    sweep: str
    place: dict[str, str]
    folder: str
    state: str
    step: int  # reached, in a checkpoint or live
    steps: int
    note: str = ""  # a failure's reason, or that other code or another config computed what is there


def main(argv: Sequence[str]) -> int:
    parser = Parser("fewbits status", __doc__, EXAMPLES)
    parser.add_argument("words", nargs="+", metavar="WORD", help="as for `fewbits sweep`")
    parser.add_argument("--runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument("--json", action="store_true", help="the same for programs: a list of objects")
    options = parser.parse_args(argv)
    rows = standings(in_store(options.words, options.runs))
    if options.json:
        print(json.dumps([vars(row) for row in rows], indent=2))
        return 0
    for row in rows:
        place = " ".join(f"{key}={value}" for key, value in row.place.items())
        print(f"{row.sweep}  {place}  {row.folder}  {row.state} {row.step}/{row.steps}  {row.note}".rstrip())
    distinct = {row.folder: row.state for row in rows}
    print(f"\n{len(distinct)} trials: " + ", ".join(f"{n} {state}" for state, n in Counter(distinct.values()).items()))
    return 0


def standings(words: Sequence[str]) -> list[Standing]:
    from fewbits.sweeps import store
    from fewbits.sweeps.plan import plan
    from fewbits.sweeps.plans import saved_places
    from fewbits.sweeps.sweep import load_sweeps

    planned = plan(*load_sweeps(words))
    before = {sweep: {_key(row.place): row for row in rows} for sweep, rows in saved_places(planned).items()}
    rows = []
    for member in planned.members:
        trial = planned.trials[member.id]
        folder, state = trial.folder, store.state(trial.folder)
        failure = store.failure(folder) if state is store.State.FAILED else None
        note = failure.reason if failure else ""
        was = before[member.cell.sweep].get(_key(member.cell.place))
        if state is store.State.PLANNED and was is not None and was.id != member.id:
            note = (
                f"stale: {was.folder} was computed by other code or config; `fewbits explain {was.folder}` says which"
            )
        live: dict[str, Any] = store.progress(folder) or {}
        result = folder.result() or {}
        step = int(result.get("step", max(live.get("step", 0) if state == "running" else 0, store.reached(folder))))
        steps = trial.trial.training.steps
        rows.append(Standing(member.cell.sweep, member.cell.place, folder.path.name, str(state), step, steps, note))
    return rows


def _key(place: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(place.items()))
