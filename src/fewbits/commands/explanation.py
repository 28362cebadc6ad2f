"""Compare two trials field by field: the settings and versions whose hashes are their ids.

The functions compare two runs, or a run with the trial that its sweep file and the installed sources define now. The
settings and versions of a run are read from its run folder and from stored plans. The training data are not needed.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbits.common.wording import differences
from fewbits.sweeps.planning.stored_plans import is_location

if TYPE_CHECKING:
    from fewbits.experiments.trial import Trial
    from fewbits.sweeps.planning.expand import Cell
    from fewbits.sweeps.planning.plan import Member, Plan


def recipe_differences(a: Path, b: Path) -> list[str]:
    """Return lines `recipe.KEY: A → B` for the recipes' names and settings in which the runs `a` and `b` differ.

    Only settings that an override of one of the runs sets, such as `recipe.threshold=0.03`, are compared. The
    operands of a recipe follow from its settings, so operands that differ are not listed. If the overrides of a run are
    unknown or its recipe is not on this machine, only the names are compared.
    """
    from fewbits.experiments.config import recipe_and_settings
    from fewbits.experiments.storage.run_folder import saved_trial

    sides: list[dict[str, Any]] = []
    named: set[str] = {"name"}
    for path in (a, b):
        overrides = _overrides(path)
        chosen = [text for text in overrides if text.startswith(("recipe=", "recipe."))]
        named |= {text.partition("=")[0].removeprefix("recipe.") for text in chosen}
        try:
            settings = recipe_and_settings([*filter(is_location, overrides), *chosen])[1]
        except ValueError:
            settings = {}
        sides.append({**settings, "name": saved_trial(path).recipe.name})
    common = [key for key in sides[0] if key in sides[1] and key in named]
    left, right = ({"recipe": {key: side[key] for key in common}} for side in sides)
    return differences(left, right)


def data_differences(a: Path, b: Path) -> list[str]:
    """Return a line for each setting of the data in which the runs `a` and `b` differ; none if their data are equal.

    The settings whose hash is the id contain only a digest of the data, which does not tell what has changed.
    """
    from fewbits.experiments.storage.run_folder import saved_trial

    if _provenance(a)["identity"].get("data") == _provenance(b)["identity"].get("data"):
        return []
    left, right = ({"data": asdict(saved_trial(path).data)} for path in (a, b))
    return differences(left, right)


def _overrides(path: Path) -> list[str]:
    """Return the overrides of a run, from the newest stored plan that contains it.

    If no stored plan contains the run, return the overrides of its recorded command if this is `fewbits train`, else an
    empty list. path: the run folder.
    """
    from fewbits.sweeps.planning.stored_plans import stored_plans

    provenance = _provenance(path)
    for stored in stored_plans(path.resolve().parent):
        if cell := next((member.cell for member in stored.plan.members if member.id == provenance["id"]), None):
            return [*cell.overrides]
    _, *command = provenance.get("command") or [""]
    return [text for text in command[1:] if "=" in text and text[0] != "-"] if command[:1] == ["train"] else []


def as_computed(path: Path) -> dict[str, Any]:
    """Return the settings whose hash is a run's id, by name.

    path: the run folder. The key `sources` has the digests of files that were edited when the trial ran. The key
    `config` has all settings of the trial. The key `parent` has the text NAME@STEP, the name of the parent's run folder
    and the step at which the trial starts, or None if the trial has no parent.
    """
    from fewbits.experiments.identity import all_settings
    from fewbits.experiments.storage.run_folder import saved_trial

    provenance = _provenance(path)
    parent = provenance["identity"].get("parent")
    name = parent and f"{Path(provenance.get('parent') or parent.get('id') or parent['meaning']).name}@{parent['step']}"
    fields = {**provenance["identity"], "config": all_settings(saved_trial(path)), "parent": name}
    return {key: value for key, value in fields.items() if key not in ("numerics", "edited", "probe")} | _of_sources(
        provenance
    )


def _of_sources(provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the numerics version of a run's sources, and the digests of the files that had been edited."""
    version = provenance["identity"].get("numerics")
    if isinstance(version, list):  # fewbits 0.1.0 recorded digests of all files, but no version
        return {"numerics version": 1} if version else {}
    edited = provenance.get("sources") or {} if "edited" in provenance["identity"] else {}
    files = {f"edited source {path}": (digest or "removed")[:12] for path, digest in edited.items()}
    return ({} if version is None else {"numerics version": version}) | files


def compared_with_today(path: Path) -> list[str]:
    """Return lines with the differences between a run and the trial that the sweep file and the sources give now.

    The newest stored plan that contains the run tells the run's place in its sweep; the run is compared with the trial
    that the sweep file now has at this place. If no stored plan contains the run, only the sources are compared.
    """
    from fewbits.experiments.identity import all_settings, is_current
    from fewbits.experiments.numerics import changed, numerics, running
    from fewbits.experiments.storage.run_folder import saved_trial

    provenance, trial = _provenance(path), saved_trial(path)
    was: dict[str, Any] = {"config": all_settings(trial)}
    now = was
    if planned := _planned(path, provenance["id"]):
        was, now = _by_plan(*planned)
    if not is_current(provenance):
        sources = {path: running().get(path) for path in changed()}
        was, now = was | _of_sources(provenance), now | _of_sources({"identity": numerics(), "sources": sources})
    return differences(was, now)


def _provenance(path: Path) -> dict[str, Any]:
    from fewbits.experiments.storage.run_folder import opened

    provenance = opened(path).provenance() or {}
    if not isinstance(provenance.get("identity"), dict):
        raise ValueError(
            f"{path / 'provenance.json'} has no key `identity` with the settings whose hash is the run's id: restore "
            "the file, or run the trial again"
        )
    return provenance


# -------------------------------------------------------------------------------- the trial of the overrides now


def _planned(path: Path, trial: str) -> tuple[Plan, Member, Cell] | None:
    """Return the newest stored plan that contains a trial, the trial's place in this plan, and the present cell there.

    The present cell is the one that the sweep file now has at this place. path: the trial's run folder. trial: the
    trial's id. Return None if no stored plan contains the trial.
    """
    from fewbits.sweeps.planning.stored_plans import stored_plans

    for stored in stored_plans(path.resolve().parent):
        member = next((member for member in stored.plan.members if member.id == trial), None)
        if member is not None:
            return stored.plan, member, _cell_today(stored.overrides, member.cell)
    return None


def _cell_today(overrides: tuple[str, ...], cell: Cell) -> Cell:
    """Return the cell that the sweep file now has at the place of `cell`, a cell of a stored plan.

    If the sweep file no longer has this place or cannot be read, return `cell`. overrides: the overrides with which the
    plan was stored; they select its sweeps.
    """
    from fewbits.sweeps.planning.expand import expand
    from fewbits.sweeps.planning.studies import load_sweeps

    try:
        sweeps, extra = load_sweeps(overrides)
        cells = [current for sweep in sweeps if sweep.name == cell.sweep for current in expand(sweep, extra)]
    except ValueError:  # for example because the sweep file is not on this machine
        return cell
    return next((current for current in cells if current.place == cell.place), cell)


def _by_plan(plan: Plan, member: Member, cell: Cell) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two mappings: the settings with which the trial was planned, and the settings that `cell` gives now.

    plan: a stored plan. member: the trial's place in this plan. cell: the cell that the sweep file now has there.

    Each mapping has the keys `config`, `data` and `at` (where the trial starts in its parent: a step or a fraction).
    If the trial has a parent both in the stored plan and now, each mapping has the same keys for the parent, with the
    prefix `parent.`. This is repeated for the parent's parent, with the prefix `parent.parent.`, and so on, up to the
    first trial that has no parent in the stored plan or no parent now. For this last trial, each mapping also has the
    key `branches` (with the trial's prefix): in the first mapping, whether the stored plan has a parent for the trial;
    in the second, whether the sweep file has one now.
    """
    from fewbits.experiments.config import load_trial
    from fewbits.experiments.identity import all_settings

    as_planned: dict[str, Any] = {}
    as_of_today: dict[str, Any] = {}
    planned, old, new, prefix = plan.trials[member.id], member.cell, cell, ""
    while True:
        current = _with_vocabulary(load_trial(new.overrides)[0], planned.trial, new)
        as_planned |= {f"{prefix}config": all_settings(planned.trial), f"{prefix}data": asdict(planned.trial.data)}
        as_of_today |= {f"{prefix}config": all_settings(current), f"{prefix}data": asdict(current.data)}
        as_planned[f"{prefix}at"], as_of_today[f"{prefix}at"] = old.at, new.at
        if planned.parent is None or old.parent is None or new.parent is None:
            as_planned[f"{prefix}branches"] = old.parent is not None
            as_of_today[f"{prefix}branches"] = new.parent is not None
            return as_planned, as_of_today
        planned, old, new, prefix = plan.trials[planned.parent], old.parent, new.parent, f"{prefix}parent."


def _with_vocabulary(current: Trial, planned: Trial, cell: Cell) -> Trial:
    """Return `current` with the vocabulary size of `planned`, since this size depends on the data, which are not read.

    Return `current` unchanged if an override of `cell` sets the size, or if the names of the two trials' models differ.
    current: the trial that the overrides of `cell` give now. planned: the trial at the same place in a stored plan.
    """
    if (
        any(override.startswith("model.vocab=") for override in cell.overrides)
        or current.model.name != planned.model.name
    ):
        return current
    return replace(current, model=replace(current.model, vocab=planned.model.vocab))
