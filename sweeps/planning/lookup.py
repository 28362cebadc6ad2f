"""Find the plan for a command that reads results, such as `fewbits status`, `report` and `sync`.

`fewbits sweep` makes a new plan at each call and stores it under the command's overrides. Other commands with the same
overrides read the stored plan, so they show the same trials on any machine that has access to the store. If there is no
stored plan, or if the sweep's definition has changed since, the command makes a new plan in memory, which needs the
training data.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fewbits.common.terminal import notice
from fewbits.experiments.composition import nearest_first
from fewbits.experiments.config import load_trial
from fewbits.sweeps.planning.expand import expand
from fewbits.sweeps.planning.overrides import is_location, normalised, runs_named, without_sweep
from fewbits.sweeps.planning.plan import Plan, plan
from fewbits.sweeps.planning.stored_plans import (
    Place,
    StoredPlan,
    UnusablePlan,
    definition,
    earlier_runs,
    load_plan,
    stored_plans,
)
from fewbits.sweeps.planning.sweep import Sweep, load_sweeps


@dataclass(frozen=True)
class FoundPlan:
    """A plan, with notes about where it comes from."""

    plan: Plan
    changed: str = ""  # one line that says that the sweep's definition has changed or cannot be read; usually empty
    notes: tuple[str, ...] = ()  # lines for stderr: `changed`, and why a plan file was not used
    earlier: Mapping[Place, str] = field(default_factory=dict)  # for a new plan: `earlier_runs(plan)`; else empty


def find_plan(overrides: Sequence[str]) -> FoundPlan:
    """Return the stored plan of these overrides; if there is none, or if the sweep has changed since, a new plan.

    The sweep has changed if its definition differs from the one in the stored plan. If a new plan cannot be made,
    return the stored one with a note; if there is no stored one either, raise ValueError.
    overrides: as for `fewbits sweep`, or only the name of a multirun.
    """
    named = [override for override in overrides if not is_location(override)]
    if len(named) == 1 and "=" not in named[0] and not named[0].endswith((".yaml", ".yml")):
        return _multirun(named[0], overrides)
    try:
        sweeps, extra = load_sweeps(overrides)
    except ValueError as error:
        return _without_definition(overrides, error)
    runs = _store(overrides, sweeps, extra)
    again = f"`fewbits sweep {_command(overrides)}`"
    notes: list[str] = []
    stored = _stored(runs, overrides, notes)
    if stored is None:
        return _planned_here(sweeps, extra, notes=notes)
    if definition(sweeps) == definition(stored.plan.sweeps):
        return FoundPlan(stored.plan, notes=tuple(notes))
    changed = f"the definition of the sweep has changed since it last ran, on {stored.time}; {again} runs the new one"
    try:
        return _planned_here(sweeps, extra, changed, notes)
    except ValueError as error:
        changed += f"; the stored plan is shown, since the new one cannot be made here: {error}"
        return FoundPlan(stored.plan, changed, (*notes, changed))


def _multirun(name: str, overrides: Sequence[str]) -> FoundPlan:
    runs, notes = Path(runs_named(overrides) or "runs").expanduser(), list[str]()
    stored = _stored(runs, overrides, notes)
    if stored is None:
        valid = [stored.overrides[0] for stored in stored_plans(runs) if is_multirun(stored)]
        raise ValueError(
            f"no sweep {name!r}: expected study=NAME, a file NAME.yaml, or the name of a multirun in {runs}: "
            f"{nearest_first(name, valid) or 'this store has no multirun'}"
        )
    return FoundPlan(stored.plan, notes=tuple(notes))


def is_multirun(stored: StoredPlan) -> bool:
    """Tell whether a stored plan belongs to a multirun, which is so if its only override is the name of its sweep."""
    return len(stored.overrides) == 1 and stored.overrides[0] == stored.plan.sweeps[0].name


def show_notes(notes: Iterable[str]) -> None:
    """Print each of these lines, the `notes` of a FoundPlan, to stderr."""
    for note in notes:
        notice(note)


def _without_definition(overrides: Sequence[str], error: ValueError) -> FoundPlan:
    """Return the stored plan of a sweep whose definition could not be read, with `error` as a note.

    If there is no stored plan, raise `error`.
    """
    stored = _stored(Path(runs_named(overrides) or "runs").expanduser(), overrides, [])
    if stored is None:
        raise error
    changed = f"the definition of the sweep cannot be read here; the plan of {stored.time} is shown: {error}"
    return FoundPlan(stored.plan, changed, (changed,))


def _planned_here(
    sweeps: Sequence[Sweep], extra: tuple[str, ...], changed: str = "", notes: Sequence[str] = ()
) -> FoundPlan:
    made = plan(sweeps, extra)
    return FoundPlan(made, changed, (*notes, *([changed] if changed else [])), earlier_runs(made))


def _stored(runs: Path, overrides: Sequence[str], notes: list[str]) -> StoredPlan | None:
    """Return the stored plan of these overrides, or None if there is none.

    If the overrides select one sweep of a study (`sweep=NAME`) and only the plan of the whole study is stored, return
    this sweep's trials of the study's plan. Append a line to `notes` for each plan file that cannot be used.
    """
    name, others = without_sweep(overrides)
    for selection, part in ((overrides, None), *([(others, name)] if name else [])):
        try:
            if (stored := load_plan(runs, selection)) is not None:
                return stored if part is None else _part(stored, part)
        except UnusablePlan as error:
            notes.append(f"{error}; this plan file is not used: `fewbits sweep {_command(selection)}` writes a new one")
    return None


def _part(stored: StoredPlan, sweep: str) -> StoredPlan | None:
    """Return a stored plan reduced to one sweep: its trials and their parents; None if the plan lacks the sweep."""
    whole = stored.plan
    sweeps = tuple(each for each in whole.sweeps if each.name == sweep)
    members = tuple(member for member in whole.members if member.cell.sweep == sweep)
    wanted = {member.id for member in members}
    for key, planned in reversed(whole.trials.items()):  # branches first, since a plan lists parents before them
        if key in wanted and planned.parent is not None:
            wanted.add(planned.parent)
    trials = {key: planned for key, planned in whole.trials.items() if key in wanted}
    return replace(stored, plan=Plan(sweeps, members, trials)) if members else None


def _store(overrides: Sequence[str], sweeps: Sequence[Sweep], extra: tuple[str, ...]) -> Path:
    """Return the store that the command's overrides name, or else the store in the config of the sweeps' first cell.

    sweeps, extra: the sweeps that the overrides select, and further overrides for every trial. If the sweeps have no
    cell, the store is the folder `runs` in the working directory.
    """
    runs = runs_named(overrides)
    if runs is None:
        cell = next((cell for sweep in sweeps for cell in expand(sweep, extra)), None)
        runs = "runs" if cell is None else _store_of(cell.overrides)
    return Path(runs).expanduser().resolve()


def _store_of(overrides: Sequence[str]) -> str:
    """Return the store of the trial with these overrides.

    If the trial's config files are not on this machine, return the store that the overrides name, or else `runs`.
    """
    try:
        return load_trial(overrides)[1].runs
    except ValueError:
        return runs_named(overrides) or "runs"


def _command(overrides: Sequence[str]) -> str:
    runs = runs_named(overrides)
    return shlex.join([*normalised(overrides), *(["--runs", runs] if runs else [])])
