"""Choose the kind of machine for each trial: all trials of a seed run on one kind, so that arms can be compared.

The kind of a seed is the first of these that applies:
- the kind that `--like` names, if a machine is of this kind;
- the kind that computed a parent of the seed's branches: the first in the plan of those that were computed;
- the kind that computed most trials of the seed;
- the kind that would be the first to finish all trials of the seed.

If no machine of a cluster is of a trial's kind any more, the trial waits for WAIT seconds. Then the remaining trials of
its seed run on another kind, which is logged; the report does not compare trials of different kinds.
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

WAIT = 60.0  # seconds for which trials wait for a machine of their kind to join a cluster

Seed = tuple[int, bool]  # (seed, whether its trials use GPUs): a seed's trials on CPUs and on GPUs have separate kinds


@dataclass
class Placement:
    """The choice of a kind of machine for each seed of a plan."""

    plan: Plan
    backend: Backend
    like: str | None = None  # the kind that `--like` names
    log: Callable[[str], None] = lambda line: None
    kinds: dict[Seed, str] = field(default_factory=dict)  # the kinds chosen so far
    _machines: Sequence[Machine] = ()  # the backend's machines at the last `refresh`
    _lost: dict[str, float] = field(default_factory=dict)  # kinds without a machine, and when this was noticed
    _load: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by kind: FLOPs that its seeds need
    _listed: bool = False  # the kinds were logged

    def refresh(self) -> None:
        """Read from the backend which machines there are now. The driver calls it in every turn of its loop."""
        self._machines = self.backend.machines()

    def kind_for(self, planned: Planned) -> str | None:
        """Return the kind on which the trial has to run, and choose it if the trial's seed has no kind yet.

        Return None (any kind) if no machine of a known kind is large enough for the trial.
        """
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
                f"seed {seed[0]}: no machine has the kind {kind} of this seed's earlier trials; the remaining trials "
                f"run on {self.kinds[seed]} and are not compared with the earlier trials (--like {self.kinds[seed]} "
                "runs the earlier trials again)"
            )
        return self.kinds[seed]

    def waits(self, kind: str | None, resources: Resources) -> bool:
        """Tell whether a trial with these resources has to wait, because no present machine of this kind can run it.

        The result is False if `kind` is None (any kind).
        """
        return kind is not None and kind not in room_by_kind(self._machines, resources)

    def is_lost(self, kind: str | None, resources: Resources) -> bool:
        """Tell whether trials with these resources no longer wait for a machine of this kind.

        Trials wait for WAIT seconds from the first call in which no machine of the kind could run them. If the backend
        has only one machine (`alone`), they do not wait, because no other machine can join.
        """
        if kind is None or not self._machines or not self.waits(kind, resources):
            return False
        patience = 0.0 if self.backend.alone else WAIT
        if kind not in self._lost:
            self._lost[kind] = time.monotonic()
            if patience:
                self.log(f"no machine has the kind {kind} now: its trials wait up to {patience:.0f} s for one to join")
        return time.monotonic() - self._lost[kind] >= patience

    def _choose(self, seed: Seed, kind: str) -> None:
        self.kinds[seed] = kind
        self._load[kind] += self._missing_work(seed)

    def _kind_so_far(self, seed: Seed) -> str | None:
        """Return the kind that computed a parent of the seed's branches: the first in the plan that was computed.

        If no such parent was computed yet, return the kind that computed most trials of the seed; None if none was.
        """
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
        """Return the kind that would be the first to finish the seed's trials.

        Each kind first has to run the trials of the seeds for which it was already chosen. room: by kind, the number of
        trials that it can run at a time.
        """
        work = self._missing_work(seed)
        return min(sorted(room), key=lambda kind: (self._load[kind] + work) / room[kind])

    def _missing_work(self, seed: Seed) -> float:
        trials = (planned for planned in self.plan.trials.values() if _seed(planned) == seed)
        return sum(work_of(planned.trial) for planned in trials if state(planned.folder) not in OVER)


def _seed(planned: Planned) -> Seed:
    return planned.trial.seed, bool(planned.resources.gpus)
