"""Determine the kind of processor or GPU of a machine, and the kind that computed a trial.

The kind of a trial on a CPU is the processor's, for example `amd-avx2`; the kind of a trial on GPUs is the GPU's name.
Trials round in the same way if four things are equal: their kind, kernel backend, version of torch and limits (the
environment variables, such as MKL_CBWR, that change the order of sums). Reports compare trials of one seed only if all
four are equal.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fewbits.experiments.environment import COMPARED_KEYS, compared_values, gpu_kind, processor_kind
from fewbits.experiments.identity import environments
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.cluster.capacity import bundle, bundles_that_fit
from fewbits.sweeps.planning.sweep import Resources

UNKNOWN = "an unknown kind"

# The environments that computed a run's steps, in order; each is the tuple of the values of COMPARED_KEYS (kind,
# backend, torch, limits). Empty: unknown.
Computed = tuple[tuple[str | None, ...], ...]


# ------------------------------------------------------------------------------------------------ kinds of runs


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


# ------------------------------------------------------------------------------------------------ machines


@dataclass(frozen=True)
class Machine:
    """A machine on which trials can run: this machine, or a node of a Ray cluster."""

    processor: str  # the kind of the processor
    gpu: str | None  # the kind of the GPUs; None: the machine has no GPU
    torch: str  # the version of torch
    resources: Mapping[str, float]  # the machine's total CPU, GPU and memory (in bytes), by Ray's names
    id: str = ""  # the node's id in Ray
    labels: Mapping[str, str] = field(default_factory=dict)  # the node's labels in Ray

    def kind(self, resources: Resources) -> str | None:
        """Return this machine's kind for trials with these resources: the GPU's if they have GPUs, else the CPU's."""
        return self.gpu if resources.gpus else self.processor

    def bundles_that_fit(self, resources: Resources) -> float:
        """Return how many ranks with these resources fit on this machine at a time, if nothing else runs there."""
        return bundles_that_fit(self.resources, bundle(resources))


def room_by_kind(machines: Sequence[Machine], resources: Resources) -> dict[str, float]:
    """Return, by kind of machine, how many trials with these resources fit at a time on all machines of that kind.

    Kinds whose machines cannot hold all ranks of one trial are left out.
    """
    ranks: dict[str, float] = {}
    for machine in machines:
        if (kind := machine.kind(resources)) is not None:
            ranks[kind] = ranks.get(kind, 0.0) + machine.bundles_that_fit(resources)
    return {kind: count / resources.ranks for kind, count in ranks.items() if count >= resources.ranks}


def this_machine() -> Machine:
    """Return this machine with its kinds, version of torch, GPUs, memory, and the CPUs that this process may use."""
    gpus = _gpus()
    resources = {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(len(gpus))}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind = gpu_kind(gpus[0]) if gpus else None
    return Machine(processor_kind(), kind, str(torch.__version__), resources | {"memory": float(memory)})


def _gpus() -> list[str]:
    """Return the names of this machine's GPUs; empty if there are none.

    They are read from `nvidia-smi`, since a request to CUDA would occupy half a GiB of GPU memory.
    """
    command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
