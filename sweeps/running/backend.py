"""Where trials are computed: the protocol that the driver knows, whatever is behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fewbits.sweeps.cluster.capacity import Demand
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.machine_kinds import Machine

if TYPE_CHECKING:  # what trains is not loaded by what finds that there is nothing to train
    from fewbits.sweeps.running.worker import Job, Outcome


@dataclass(frozen=True)
class Ended:
    """A trial's process, or its group of them, is through. outcome None: it died; `why` says how, as far as known."""

    id: str
    outcome: Outcome | None
    why: str = ""


class Backend(Protocol):
    @property
    def alone(self) -> bool:
        """Whether this machine is all there is, so that no other kind of machine can join."""

    def require(self, demands: Sequence[Demand], say: Callable[[str], None]) -> None:
        """Raise ValueError, naming the trials, if some ask for what can never be given here. Called before any start;
        it may take a minute on a cluster whose nodes are still joining, and says so."""

    def machines(self) -> Sequence[Machine]:
        """Return the machines whose kind is known, as they are now; none if no kind is known."""

    def room(self, resources: Resources, like: str | None = None) -> bool:
        """Whether to start one more of these now, on machines of that kind (None: on any)."""

    def start(self, job: Job, resources: Resources, like: str | None = None) -> None:
        """Begin, on machines of that kind (None: on any), and come back at once."""

    def wait(self, seconds: float) -> list[Ended]:
        """What has ended, as soon as something has, or nothing after that time."""

    def kill(self, trial: str) -> None:
        """End its processes at once. `wait` reports it, as died."""

    def close(self) -> None:
        """End everything that was started here, and nothing else."""
