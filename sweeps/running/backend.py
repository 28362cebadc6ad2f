"""Define the interface through which the driver starts trials on a backend: local processes or Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.trial import Runtime, Trial
from fewbits.sweeps.planning.plan import Planned
from fewbits.sweeps.planning.sweep import Resources


@dataclass(frozen=True)
class Job:
    """The work of one worker: a trial, or one rank of it."""

    id: str  # of the trial
    path: Path  # of the run folder
    trial: Trial
    runtime: Runtime
    made_of: Mapping[str, object]  # the settings and versions whose hash is the id
    sources: str  # digest of the driver's sources that compute (`numerics.total`)
    environment: Mapping[str, str] = field(default_factory=dict)  # variables to set, such as RANK, CUDA_VISIBLE_DEVICES

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path, self.id)

    @property
    def leads(self) -> bool:
        return self.environment.get("RANK", "0") == "0"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job.

    Its kind is `over` (the trial has a result), `stopped` (someone asked it to stop), `busy` (another process trains
    the trial) or `failed` (an error; another attempt may succeed unless `wrong_input` is true).
    """

    kind: str
    reason: str = ""  # the error, or the process that trains the trial
    wrong_input: bool = False  # the input is invalid, so another attempt would fail in the same way
    speed: float | None = None  # tokens per second, the median over the steps


@dataclass(frozen=True)
class Ended:
    """The report that a trial's processes have ended."""

    id: str  # of the trial
    outcome: Outcome | None  # None: a process died without reporting an outcome
    why: str = ""  # if a process died: how, in a few words; empty if unknown


class Backend(Protocol):
    """The interface of a backend, which runs the worker processes of trials on this machine or on a cluster."""

    def require(self, trials: Sequence[Planned]) -> None:
        """Raise ValueError if a trial requests more than this machine has and no other machine can run it."""

    def room(self, resources: Resources) -> bool:
        """Tell whether one more trial with these resources may start now."""

    def start(self, job: Job, resources: Resources) -> None:
        """Start a job's trial as soon as its resources are free, and return without waiting for it."""

    def wait(self, seconds: float) -> list[Ended]:
        """Wait until a trial ends, at most `seconds`; return the trials that have ended since the last call."""

    def kill(self, trial: str) -> None:
        """Kill the trial's processes at once. `wait` then reports that the trial died."""

    def close(self) -> None:
        """End all processes that this backend has started, and no others."""


def bundle(resources: Resources) -> dict[str, float]:
    """Return the CPUs and GPUs that one rank needs, by Ray's names; amounts of 0 are left out."""
    return {name: amount for name, amount in (("CPU", resources.cpus), ("GPU", resources.gpus)) if amount}


def bundles_that_fit(machine: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """Return how many copies of a bundle fit on a machine while nothing else runs there; infinity for an empty bundle.

    machine: the machine's resources, by Ray's names. wanted: the bundle.
    """
    return min(((machine.get(name, 0.0) + 1e-9) // amount for name, amount in wanted.items()), default=float("inf"))


def require_here(trial: str, resources: Resources, machine: Mapping[str, float]) -> None:
    """Raise ValueError if a trial requests more than this machine has. trial: the name of its run folder."""
    if bundles_that_fit(machine, wanted := bundle(resources)) < resources.ranks:
        raise ValueError(
            f"trial {trial} asks for {resources.ranks} × ({amounts(wanted)}), but this machine has {amounts(machine)}: "
            "lower `resources` (ranks × what each rank needs), or use --address with a cluster"
        )


def amounts(resources: Mapping[str, float]) -> str:
    """Return resources as text, for example `1 GPU, 16 CPUs`. resources: amounts by Ray's names."""
    parts = [f"{count:g} {name}{'s' * (count != 1)}" for name in ("GPU", "CPU") if (count := resources.get(name, 0.0))]
    return ", ".join(parts) or "no resources"
