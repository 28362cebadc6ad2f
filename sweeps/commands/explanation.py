"""Why two trials are not the same: what their ids are made of, field by field.

Everything is read from run folders and stored plans, so that it can be told without the data of the trials and on
another machine than theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewbits.experiments.trial import Trial
    from fewbits.sweeps.planning.expand import Cell
    from fewbits.sweeps.planning.plan import Member, Plan

SHOWN = 12  # hexadecimal digits of a digest
MISSING = "(none)"


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """A line for each field that differs, `key: a → b`."""
    left, right = dict(_flat(a)), dict(_flat(b))
    keys = [*left, *(key for key in right if key not in left)]
    pairs = [(key, left.get(key, MISSING), right.get(key, MISSING)) for key in keys]
    return [f"{key}: {_shown(was)} → {_shown(now)}" for key, was, now in pairs if was != now]


def as_computed(path: Path) -> dict[str, Any]:
    """Return what a run's id is made of, with the sources file by file."""
    from fewbits.experiments.identity import all_settings
    from fewbits.experiments.runs.run_folder import saved_trial

    provenance = _provenance(path)
    files = provenance.get("sources")
    parent = provenance["identity"].get("parent")
    name = parent and f"{Path(provenance.get('parent') or parent['meaning']).name}@{parent['step']}"
    found = {**provenance["identity"], "config": all_settings(saved_trial(path)), "parent": name}
    return found | {"numerics": files} if files else found


def compared_with_today(path: Path) -> list[str]:
    """Return the differences between a run and what its overrides and sources are today.

    The overrides are those of the newest stored plan that has the run; without one, the run's own config is taken.
    """
    from fewbits.experiments.fingerprint.numerics import source_digests
    from fewbits.experiments.identity import all_settings, computed_by_todays_sources
    from fewbits.experiments.runs.run_folder import saved_trial

    provenance, trial = _provenance(path), saved_trial(path)
    made_of, files = provenance["identity"], provenance.get("sources")
    was: dict[str, Any] = {"config": all_settings(trial)}
    now = was
    if planned := _planned(path, provenance["id"]):
        was, now = _by_plan(*planned)
    if not computed_by_todays_sources(provenance):
        was, now = was | {"sources": files}, now | {"sources": source_digests(made_of["device"])}
    return differences(was, now)


def _provenance(path: Path) -> dict[str, Any]:
    from fewbits.experiments.runs.run_folder import opened

    provenance = opened(path).provenance() or {}
    if not isinstance(provenance.get("identity"), dict):
        raise ValueError(f"{path / 'provenance.json'} does not say what the run's id is made of")
    return provenance


# -------------------------------------------------------------------------------- what the overrides give today


def _planned(path: Path, trial: str) -> tuple[Plan, Member, Cell] | None:
    """Return the newest stored plan that has the trial, its place there, and today's cell of that place."""
    from fewbits.sweeps.planning.stored_plans import stored_plans

    for stored in stored_plans(path.resolve().parent):
        member = next((member for member in stored.plan.members if member.id == trial), None)
        if member is not None:
            return stored.plan, member, _cell_today(stored.overrides, member.cell)
    return None


def _cell_today(overrides: tuple[str, ...], cell: Cell) -> Cell:
    """Return the cell that stands in the same place today; where that cannot be told, the stored one."""
    from fewbits.sweeps.planning.expand import expand
    from fewbits.sweeps.planning.sweep import load_sweeps

    try:
        sweeps, extra = load_sweeps(overrides)
        cells = [one for sweep in sweeps if sweep.name == cell.sweep for one in expand(sweep, extra)]
    except ValueError:  # its file is not here
        return cell
    return next((one for one in cells if one.place == cell.place), cell)


def _by_plan(plan: Plan, member: Member, cell: Cell) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trial as it was planned and as its cell describes it today, each with the trials it branches from."""
    from fewbits.experiments.config import load_trial
    from fewbits.experiments.identity import all_settings

    was: dict[str, Any] = {}
    now: dict[str, Any] = {}
    planned, old, new, where = plan.trials[member.id], member.cell, cell, ""
    while True:
        today = _with_vocabulary(load_trial(new.words)[0], planned.trial, new)
        was |= {f"{where}config": all_settings(planned.trial), f"{where}data": asdict(planned.trial.data)}
        now |= {f"{where}config": all_settings(today), f"{where}data": asdict(today.data)}
        was[f"{where}at"], now[f"{where}at"] = old.at, new.at
        if planned.parent is None or old.parent is None or new.parent is None:
            was[f"{where}branches"], now[f"{where}branches"] = old.parent is not None, new.parent is not None
            return was, now
        planned, old, new, where = plan.trials[planned.parent], old.parent, new.parent, f"{where}parent."


def _with_vocabulary(today: Trial, was: Trial, cell: Cell) -> Trial:
    """Return today's trial with the recorded vocabulary, which follows from the data, unless an override sets it."""
    if any(word.startswith("model.vocab=") for word in cell.words) or today.model.name != was.model.name:
        return today
    return replace(today, model=replace(today.model, vocab=was.model.vocab))


def _flat(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{where}.{key}" if where else str(key))
    else:
        yield where, list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    text = str(value)
    digest = len(text) >= 64 and all(c in "0123456789abcdef" for c in text[:64])
    return text[:SHOWN] + text[64:] if digest else text
