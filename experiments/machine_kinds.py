"""Determine the kind of machine that computed a run, and start a run again that another kind has begun.

The kind of a trial on a CPU is the processor's, for example `amd-avx2`; the kind of a trial on GPUs is the GPU's name.
Trials round in the same way if four things are equal: their kind, kernel backend, version of torch and limits (the
environment variables, such as MKL_CBWR, that change the order of sums). Reports compare trials of one seed only if all
four are equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

from fewbits.common.atomic import remove_folder
from fewbits.experiments.environment import COMPARED_KEYS, Environment, compared_values
from fewbits.experiments.identity import environments
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import RunFolder

UNKNOWN = "an unknown kind"

# The environments that computed a run's steps, in order; each is the tuple of the values of COMPARED_KEYS (kind,
# backend, torch, limits). Empty: unknown.
Computed = tuple[tuple[str | None, ...], ...]


def computed(folder: RunFolder) -> Computed:
    """Return the different environments that computed a run's steps, in the order of their first steps.

    An environment is a tuple with the values of COMPARED_KEYS: the kind of machine, the kernel backend, the version of
    torch, and the environment variables that change the order of sums. The result is empty if the run has not started,
    if an old version of fewbits computed it, or if its `provenance.json` is damaged.
    """
    try:
        provenance = folder.provenance() or {}
    except ValueError:  # provenance.json is damaged, which is treated as if it were missing
        return ()
    return tuple(dict.fromkeys(compared_values(environment) for environment in environments(provenance)))


def is_mixed(one: Computed) -> bool:
    """Tell whether more than one environment computed a run's steps. one: the run's environments, from `computed`."""
    return len(one) > 1


def alike(one: Computed, other: Computed) -> bool:
    """Tell whether two runs can be compared: a single environment computed all their steps, or none is known.

    one, other: the environments of the two runs, from `computed`. Two runs without any known environment can be
    compared with each other, but not with other runs.
    """
    return one == other and not is_mixed(one)


def kinds_of(one: Computed) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(kind) for kind, *_ in one))


def kind(folder: RunFolder) -> str | None:
    """Return the kind of machine that computed a run: `A, then B` if several computed its steps; None if unknown."""
    return ", then ".join(kinds_of(computed(folder))) or None


def describe(one: Computed, beside: Collection[Computed] = ()) -> str:
    """Return a text that names the kinds of machine that computed a run, for example `amd-avx2 (torch 2.11.0)`.

    one: the run's environments. beside: environments with which these are compared. The brackets contain the values of
    COMPARED_KEYS, apart from the kind, that are not equal in all environments of `one` and `beside`.
    """
    if not one:
        return UNKNOWN
    parts = [part for run in (one, *beside) for part in run]
    differing = [key for at, key in enumerate(COMPARED_KEYS) if len({part[at] for part in parts}) > 1]
    return ", then ".join(_describe_part(part, differing) for part in one)


def _describe_part(part: tuple[str | None, ...], differing: Collection[str]) -> str:
    facts = dict(zip(COMPARED_KEYS, part, strict=True))
    more = [f"{key} {facts[key]}" for key in COMPARED_KEYS[1:] if key in differing]
    return f"{facts['kind']} ({', '.join(more)})" if more else str(facts["kind"])


def discard_unlike(folder: RunFolder, here: Environment) -> None:
    """Remove a run's checkpoints if another environment than `here` has computed its steps, so that it starts again.

    If it went on from them, its steps would round in different ways. A warning says so. Call it only inside
    `RunFolder.alone`, before the run resumes.
    """
    before, now = computed(folder), (compared_values(here),)
    places = [path for place in (folder.checkpoints, folder.kept) for path in checkpoints.steps(place).values()]
    if not places or not before or before == now:
        return
    for path in places:
        remove_folder(path)
    kinds = f"its checkpoints are from {describe(before, [now])}, and this machine is {describe(now, [before])}"
    warnings.warn(f"{folder.path.name} starts again: {kinds}", stacklevel=2)
