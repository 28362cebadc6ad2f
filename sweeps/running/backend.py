"""Define the interface (`Backend`) through which the driver starts trials on a backend: local processes or Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fewbits.sweeps.cluster.capacity import Demand
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.machine_kinds import Machine

if TYPE_CHECKING:  # not imported at run time, so that a sweep with nothing left to train need not import training code
    from fewbits.sweeps.running.worker import Job, Outcome


@dataclass(frozen=True)
class Ended:
    """The report that a trial's processes have ended."""

    id: str  # of the trial
    outcome: Outcome | None  # None: a process died without reporting an outcome
    why: str = ""  # if a process died: how, in a few words; empty if unknown


class Backend(Protocol):
    """The interface of a backend, which runs the worker processes of trials on this machine or on a cluster."""

    @property
    def alone(self) -> bool:
        """True if trials run on this machine only, so that no machine of another kind can join later."""

    def require(self, demands: Sequence[Demand], log: Callable[[str], None]) -> None:
        """Raise ValueError if the backend can never provide the resources that one of the trials requests.

        The driver's caller calls it before the first `start`. On a cluster that nodes are still joining, the call may
        take a minute, and it logs a line that says so. demands: what each trial that has to run requests. log: called
        with each line of text to show.
        """

    def machines(self) -> Sequence[Machine]:
        """Return the machines that trials can run on now and whose kind of processor or GPU is known."""

    def room(self, resources: Resources, like: str | None = None) -> bool:
        """Tell whether one more trial with these resources may start now on a machine of kind `like` (None: any)."""

    def start(self, job: Job, resources: Resources, like: str | None = None) -> None:
        """Start a job's trial on a machine of the kind `like` (None: any kind), and return without waiting for it."""

    def wait(self, seconds: float) -> list[Ended]:
        """Wait until a trial ends, at most `seconds`; return the trials that have ended since the last call."""

    def kill(self, trial: str) -> None:
        """Kill the trial's processes at once. `wait` then reports that the trial died."""

    def close(self) -> None:
        """End all processes that this backend has started, and no others."""
