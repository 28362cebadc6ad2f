"""Implement `--like KIND`: trials that another kind of machine computed run again; their old run folders are kept.

A kind is the type of a processor or GPU, such as `amd-avx2`. A trial runs again if any of its steps was computed on
another or an unknown kind, or with another version of torch than machines of the kind KIND have now. A branch whose
parent runs again also runs again, since it started from other bits. The old run folder is moved to `replaced/NAME.N`
in the store. Branches that only other plans contain do not run again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fewbits.experiments.environment import COMPARED_KEYS, compared_values
from fewbits.experiments.storage.lease import Held, leased
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.running import store
from fewbits.sweeps.running.machine_kinds import Machine, computed, describe, this_machine

FOLDER = "replaced"


def require_kind(plan: Plan, like: str, machines: Sequence[Machine]) -> Machine:
    """Return the first of `machines` whose kind, for one of the plan's trials, is `like`.

    The kind for a trial is the GPU's if the trial uses GPUs, else the processor's. If there is no such machine, raise
    ValueError, which lists the kinds of these machines.
    """
    by_kind: dict[str, Machine] = {}
    for machine in machines:
        for planned in plan.trials.values():
            if (kind := machine.kind(planned.resources)) is not None:
                by_kind.setdefault(kind, machine)
    if like not in by_kind:
        valid = f"valid kinds for this sweep: {', '.join(sorted(by_kind))}" if by_kind else "no machine's kind is known"
        raise ValueError(f"--like {like}: no machine that this sweep can use is of this kind; {valid}")
    return by_kind[like]


def find_unlike(plan: Plan, like: str, address: str | None) -> dict[str, str]:
    """Return the ids of the trials that `--like` has to run again, each with the reason, without asking a cluster.

    If `address` or RAY_ADDRESS names a cluster, its machines are assumed to be of the kind `like` and to have this
    machine's version of torch. Otherwise trials run on this machine: raise ValueError if it is not of that kind.
    """
    here = this_machine()
    if address or os.environ.get("RAY_ADDRESS"):
        return reasons_to_rerun(plan, like, replace(here, processor=like, gpu=like))
    return reasons_to_rerun(plan, like, require_kind(plan, like, [here]))


def reasons_to_rerun(plan: Plan, like: str, machine: Machine) -> dict[str, str]:
    """Return the ids of the trials that have to run again on machines like `machine`, each with the reason.

    A trial has to run again if any of its steps was computed on an unknown kind of machine, on another kind than
    `like`, or with another version of torch than the machine's. It also has to run again if its parent has to.

    Two groups of trials are left out: trials without any computed step, and trials to which `like` does not apply.
    `like` applies to trials that use GPUs only if it is the kind of the machine's GPU, and to other trials only if it
    is the kind of the machine's processor.

    like: the value of `--like`, which is the kind of the machine's processor or GPU.
    """
    reasons: dict[str, str] = {}
    for key, planned in plan.trials.items():  # a parent comes before its branches, which look it up in `reasons`
        if machine.kind(planned.resources) != like or not _has_steps(planned):
            continue
        stored = computed(planned.folder)
        now = tuple(_compared_values_now(environment, like, machine) for environment in stored)
        if not stored or now != stored:
            reasons[key] = f"computed on {describe(stored, [now])}"
        elif planned.parent in reasons:
            reasons[key] = f"its parent {plan.trials[planned.parent].folder.path.name} runs again"
    return reasons


def move_aside(plan: Plan, again: Mapping[str, str]) -> list[Path]:
    """Move the run folders of the trials with the ids `again` to `replaced/`, and return their new paths.

    again: each trial's id, and the reason why it runs again. Raise ValueError, before any folder is moved, if one of
    these trials is being trained.
    """
    for key in again:
        if (holder := store.holder(plan.trials[key].folder)) is not None:
            raise ValueError(
                f"{plan.trials[key].folder.path.name} has to run again ({again[key]}), but process {holder.pid} of "
                f"{holder.host} is training it: wait until that process ends, or stop its sweep first"
            )
    return [_move(plan.trials[key].folder) for key in again]


def _move(folder: RunFolder) -> Path:
    place = folder.path.parent / FOLDER
    place.mkdir(exist_ok=True)
    try:
        with leased(folder.path):
            number = 1
            while (target := place / f"{folder.path.name}.{number}").exists():
                number += 1
            return folder.path.rename(target)
    except Held as error:
        raise ValueError(
            f"{error}, but --like has to run this trial again: wait until that process ends, or stop it first"
        ) from None


def _has_steps(planned: Planned) -> bool:
    return planned.folder.over or store.reached(planned.folder) > 0


def _compared_values_now(environment: tuple[str | None, ...], like: str, machine: Machine) -> tuple[str | None, ...]:
    """Return `environment` with `like` as the kind of machine, and with the version of torch that `machine` has.

    environment: the environment in which some steps of a trial were computed. It is a tuple with the values of the keys
    COMPARED_KEYS: kind of machine, kernel backend, version of torch, and environment variables that change how sums are
    rounded. The returned tuple has the values of the same keys.
    """
    return compared_values(dict(zip(COMPARED_KEYS, environment, strict=True)) | {"kind": like, "torch": machine.torch})
