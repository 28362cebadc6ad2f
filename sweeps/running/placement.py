"""Choose the kind of machine for each trial: all trials of a seed run on one kind, so that its arms can be compared.

A seed gets the kind that `--like` names. Without `--like`, it gets the kind that computed its trunk, or else most of
its trials. If none was computed yet, it gets the kind that would finish all its trials first. If no machine has a
trial's kind, the trial waits for a while. Then the remaining trials of its seed run on another kind, which is logged;
the report does not compare trials of different kinds.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fewbits.sweeps.planning.cost import work_of
from fewbits.sweeps.planning.plan import Plan, Planned
from fewbits.sweeps.planning.sweep import Resources
from fewbits.sweeps.running.backend import Backend
from fewbits.sweeps.running.machine_kinds import Machine, computed, kinds_of, room_by_kind
from fewbits.sweeps.running.store import OVER, state

WAIT = 60.0  # seconds for which trials wait for a kind that no machine of a cluster has

Seed = tuple[int, bool]  # a seed's trials on CPUs, or those on GPUs


@dataclass
class Placement:
    """The choice of a kind of machine for each seed of a plan."""

    plan: Plan
    backend: Backend
    like: str | None = None
    log: Callable[[str], None] = lambda line: None
    kinds: dict[Seed, str] = field(default_factory=dict)  # chosen so far
    _machines: Sequence[Machine] = ()
    _lost: dict[str, float] = field(default_factory=dict)  # kinds that no machine has, with the time of that discovery
    _load: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # FLOPs of each kind's seeds
    _listed: bool = False

    def refresh(self) -> None:
        """Get the current machines from the backend. The driver calls it every turn."""
        self._machines = self.backend.machines()

    def kind_for(self, planned: Planned) -> str | None:
        """Return the kind that the trial has to run on; None: any, if no machine of a known kind can hold the trial."""
        room = room_by_kind(self._machines, planned.resources)
        if not room:
            return None
        if len(room) > 1 and not self._listed:
            self._listed = True
            each = ", ".join(f"{kind} ({count:g} trials at a time)" for kind, count in sorted(room.items()))
            self.log(f"kinds of machines: {each}; all trials of a seed run on one kind")
        seed = _seed(planned)
        if seed not in self.kinds:
            applies = self.like is not None and any(m.kind(planned.resources) == self.like for m in self._machines)
            self._choose(seed, (self.like if applies else self._kind_so_far(seed)) or self._emptiest(seed, room))
        kind = self.kinds[seed]
        if kind in room:
            self._lost.pop(kind, None)
        elif self.is_lost(kind, planned.resources):
            self._choose(seed, self._emptiest(seed, room))
            self.log(
                f"seed {seed[0]}: no machine has the kind {kind} of its other trials; the rest runs on "
                f"{self.kinds[seed]} and is not compared with them (--like {self.kinds[seed]} runs those again)"
            )
        return self.kinds[seed]

    def waits(self, kind: str | None, resources: Resources) -> bool:
        """Tell whether a trial of this kind has to wait for a machine to join."""
        return kind is not None and kind not in room_by_kind(self._machines, resources)

    def is_lost(self, kind: str | None, resources: Resources) -> bool:
        """Tell whether the kind has been missing for so long that its trials no longer wait for it."""
        if kind is None or not self._machines or not self.waits(kind, resources):
            return False
        patience = 0.0 if self.backend.alone else WAIT
        if kind not in self._lost:
            self._lost[kind] = time.monotonic()
            if patience:
                self.log(f"no machine has the kind {kind} now: its trials wait up to {patience:.0f} s for one")
        return time.monotonic() - self._lost[kind] >= patience

    def _choose(self, seed: Seed, kind: str) -> None:
        self.kinds[seed] = kind
        self._load[kind] += self._missing_work(seed)

    def _kind_so_far(self, seed: Seed) -> str | None:
        """Return the kind that computed the seed's trials so far: that of a trunk, else that of most trials."""
        trials = [planned for planned in self.plan.trials.values() if _seed(planned) == seed]
        parents = {planned.parent for planned in trials}
        votes: Counter[str] = Counter()
        for planned in trials:
            kinds = kinds_of(computed(planned.folder))
            if kinds and planned.id in parents:
                return kinds[-1]
            votes.update(kinds[-1:])
        return votes.most_common(1)[0][0] if votes else None

    def _emptiest(self, seed: Seed, room: dict[str, float]) -> str:
        """Return the kind of machine that would be the first to finish this seed and the seeds it has already."""
        work = self._missing_work(seed)
        return min(sorted(room), key=lambda kind: (self._load[kind] + work) / room[kind])

    def _missing_work(self, seed: Seed) -> float:
        trials = (planned for planned in self.plan.trials.values() if _seed(planned) == seed)
        return sum(work_of(planned.trial) for planned in trials if state(planned.folder) not in OVER)


def _seed(planned: Planned) -> Seed:
    return planned.trial.seed, bool(planned.resources.gpus)
