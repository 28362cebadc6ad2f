"""Determine the kind of processor or GPU of a machine, and the kind that computed a trial.

The kind of a trial on a CPU is that of the processor (`amd-avx2`); the kind of a trial on GPUs is the GPU's name.
Trials with the same kind, kernel backend and torch round in the same way; within a seed, only such trials are compared.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fewbits.experiments.environment import LIKENESS, gpu_kind, likeness, processor_kind
from fewbits.experiments.identity import environments
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.cluster.capacity import bundle, slots
from fewbits.sweeps.planning.sweep import Resources

UNKNOWN = "an unknown kind"

Computed = tuple[tuple[str | None, ...], ...]  # likenesses of the environments that computed a run; empty: unknown


# ------------------------------------------------------------------------------------------------ kinds of runs


def computed(folder: RunFolder) -> Computed:
    """Return the environments that computed a run's steps, in order, each as a tuple of the entries of LIKENESS.

    The result is empty if the run has not started, or if an old version of fewbits computed it.
    """
    try:
        provenance = folder.provenance() or {}
    except ValueError:  # a damaged file counts as a missing one
        return ()
    return tuple(dict.fromkeys(likeness(environment) for environment in environments(provenance)))


def is_mixed(one: Computed) -> bool:
    """Tell whether different environments computed parts of one run."""
    return len(one) > 1


def alike(one: Computed, other: Computed) -> bool:
    """Tell whether two runs can be compared: equal environments computed all steps of both, or both are unknown."""
    return one == other and not is_mixed(one)


def kinds_of(one: Computed) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(kind) for kind, *_ in one))


def kind(folder: RunFolder) -> str | None:
    """Return the kind that computed a run's steps, or several in order if they differ; None if unknown."""
    return ", then ".join(kinds_of(computed(folder))) or None


def describe(one: Computed, beside: Collection[Computed] = ()) -> str:
    """Return the kinds of machine that computed run `one` as text, with its differences from the runs `beside`."""
    if not one:
        return UNKNOWN
    parts = [part for run in (one, *beside) for part in run]
    differing = [key for at, key in enumerate(LIKENESS) if len({part[at] for part in parts}) > 1]
    return ", then ".join(_describe_part(part, differing) for part in one)


def _describe_part(part: tuple[str | None, ...], differing: Collection[str]) -> str:
    facts = dict(zip(LIKENESS, part, strict=True))
    more = [f"{key} {facts[key]}" for key in LIKENESS[1:] if key in differing]
    return f"{facts['kind']} ({', '.join(more)})" if more else str(facts["kind"])


# ------------------------------------------------------------------------------------------------ machines


@dataclass(frozen=True)
class Machine:
    """A machine that trials can run on."""

    processor: str  # its kind
    gpu: str | None  # the kind of its GPUs; None: it has none
    torch: str
    resources: Mapping[str, float]  # in total, by Ray's names
    id: str = ""  # of the node in Ray
    labels: Mapping[str, str] = field(default_factory=dict)  # of the node in Ray

    def kind(self, resources: Resources) -> str | None:
        """Return the kind that a trial with these resources would have on this machine."""
        return self.gpu if resources.gpus else self.processor

    def slots(self, resources: Resources) -> float:
        """Return how many ranks of trials with these resources fit on this machine at a time."""
        return slots(self.resources, bundle(resources))


def room_by_kind(machines: Sequence[Machine], resources: Resources) -> dict[str, float]:
    """Return how many trials with these resources each kind of machine can run at a time; leave out 0."""
    ranks: dict[str, float] = {}
    for machine in machines:
        if (kind := machine.kind(resources)) is not None:
            ranks[kind] = ranks.get(kind, 0.0) + machine.slots(resources)
    return {kind: count / resources.ranks for kind, count in ranks.items() if count >= resources.ranks}


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    gpus = _gpus()
    resources = {"CPU": float(len(os.sched_getaffinity(0))), "GPU": float(len(gpus))}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind = gpu_kind(gpus[0]) if gpus else None
    return Machine(processor_kind(), kind, str(torch.__version__), resources | {"memory": float(memory)})


def _gpus() -> list[str]:
    """Return the names of this machine's GPUs, without CUDA, which would take half a GiB of a GPU's memory."""
    command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
