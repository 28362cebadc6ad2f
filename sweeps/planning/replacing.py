"""`--like KIND`: trials that another kind of machine computed are run again, and nothing of the old ones is lost.

A trial is unlike if any of its steps was computed on another kind or with another torch than machines of that kind have
now, or on an unknown kind. A branch whose parent runs again does so too: it started from other bits. The old run folder
is moved to `replaced/NAME.N` in the store. Branches that belong to other plans alone are not found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fewbits.experiments.environment import LIKENESS, likeness
from fewbits.experiments.runs.run_folder import Busy, RunFolder
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.machine_kinds import Machine, computed, describe, this_machine

FOLDER = "replaced"


def require_kind(plan: Plan, like: str, machines: Sequence[Machine]) -> Machine:
    """Return a machine of the kind; ValueError, naming the kinds there are, if no trial of the plan could run on it."""
    there: dict[str, Machine] = {}
    for machine in machines:
        for planned in plan.trials.values():
            if (kind := machine.kind(planned.resources)) is not None:
                there.setdefault(kind, machine)
    if like not in there:
        kinds = ", ".join(sorted(there)) or "none"
        raise ValueError(f"--like {like}: no machine has that kind; the kinds there are for this sweep: {kinds}")
    return there[like]


def find_unlike(plan: Plan, like: str, address: str | None) -> dict[str, str]:
    """Return the trials that have to run again, each with the reason, without asking a cluster: its machines count as
    this one in torch. ValueError where this machine alone computes, and has another kind."""
    here = this_machine()
    if address or os.environ.get("RAY_ADDRESS"):
        return reasons_to_rerun(plan, like, replace(here, processor=like, gpu=like))
    return reasons_to_rerun(plan, like, require_kind(plan, like, [here]))


def reasons_to_rerun(plan: Plan, like: str, machine: Machine) -> dict[str, str]:
    """Return the trials that have to run again to be like what the machine computes now, each with the reason."""
    found: dict[str, str] = {}
    for key, planned in plan.trials.items():  # parents come before their branches
        if machine.kind(planned.resources) != like or not _has_steps(planned):
            continue
        by = computed(planned.folder)
        now = tuple(_now(one, like, machine) for one in by)
        if not by or now != by:
            found[key] = f"computed on {describe(by, [now])}"
        elif planned.parent in found:
            found[key] = f"its parent {plan.trials[planned.parent].folder.path.name} runs again"
    return found


def move_aside(plan: Plan, again: Mapping[str, str]) -> list[Path]:
    """Move the run folders of these trials out of the way and return where they are now; ValueError, before any is
    moved, if one of them is being trained."""
    for key in again:
        if (holder := store.holder(plan.trials[key].folder)) is not None:
            raise ValueError(
                f"{plan.trials[key].folder.path.name} has to run again ({again[key]}), and process {holder.pid} of "
                f"{holder.host} is training it: wait for it, or stop that sweep first"
            )
    return [_moved(plan.trials[key].folder) for key in again]


def _moved(folder: RunFolder) -> Path:
    place = folder.path.parent / FOLDER
    place.mkdir(exist_ok=True)
    try:
        with folder.alone():
            number = 1
            while (target := place / f"{folder.path.name}.{number}").exists():
                number += 1
            return folder.path.rename(target)
    except Busy as error:
        raise ValueError(f"{error}; it has to run again for --like: wait for it, or stop it first") from None


def _has_steps(planned: Planned) -> bool:
    return planned.folder.over or store.reached(planned.folder) > 0


def _now(one: tuple[str | None, ...], like: str, machine: Machine) -> tuple[str | None, ...]:
    """Return the likeness with the kind and the torch of today's machine."""
    return likeness(dict(zip(LIKENESS, one, strict=True)) | {"kind": like, "torch": machine.torch})
