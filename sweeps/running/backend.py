"""Define the protocol between the driver and the backends that compute trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fewbits.sweeps.cluster.capacity import Demand
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.machine_kinds import Machine

if TYPE_CHECKING:  # a sweep with nothing left to train does not import the training code
    from fewbits.sweeps.running.worker import Job, Outcome


@dataclass(frozen=True)
class Ended:
    """The end of a trial's process or processes. outcome None: a process died; `why` says how, if that is known."""

    id: str
    outcome: Outcome | None
    why: str = ""


class Backend(Protocol):
    """A backend, which runs the processes of trials."""

    @property
    def alone(self) -> bool:
        """True if only this machine computes, so that no other kind of machine can join."""

    def require(self, demands: Sequence[Demand], log: Callable[[str], None]) -> None:
        """Raise ValueError, which names the trials, if the backend can never provide the resources of one.

        It is called before any `start`. If nodes are still joining a cluster, it may take a minute, and logs a line.
        """

    def machines(self) -> Sequence[Machine]:
        """Return the current machines whose kind is known."""

    def room(self, resources: Resources, like: str | None = None) -> bool:
        """Tell whether one more such trial should start now, on a machine of the kind `like` (None: any kind)."""

    def start(self, job: Job, resources: Resources, like: str | None = None) -> None:
        """Start a trial on a machine of the kind `like` (None: any kind), and return at once."""

    def wait(self, seconds: float) -> list[Ended]:
        """Wait until a trial ends or the seconds have passed; return the trials that have ended."""

    def kill(self, trial: str) -> None:
        """Kill the trial's processes at once. `wait` then reports that the trial died."""

    def close(self) -> None:
        """End everything that this backend has started, and nothing else."""
