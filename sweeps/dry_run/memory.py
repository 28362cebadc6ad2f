"""Tabulate for the dry run how much GPU memory one rank of each arm needs, and name the arms that need too much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fewbits.experiments.distributed.memory import MARGIN, Memory, complaint, estimate
from fewbits.sweeps.planning.plan import Plan, Planned

COLUMNS = (
    "sweep",
    "arm",
    "ranks",
    "GB a rank",
    "weights",
    "gradients",
    "states",
    "gathered",
    "quantized",
    "activations",
)


@dataclass(frozen=True)
class ArmMemory:
    """The estimated GPU memory of one rank of those trials of an arm that have the same model.

    It is computed for the first of these trials, `planned`.
    """

    sweep: str
    arm: str
    planned: Planned
    memory: Memory

    def complaint(self, device_bytes: float) -> str | None:
        """Return why the arm's trials do not fit on GPUs with `device_bytes` of memory, or None if they fit."""
        if self.memory.total <= MARGIN * device_bytes:
            return None
        reason = complaint(self.planned.trial, self.planned.resources.ranks, device_bytes)
        return reason and f"{self.sweep}/{self.arm}: {reason}"

    def row(self) -> tuple[str, ...]:
        m = self.memory
        parts = (m.total, m.weights, m.gradients, m.states, m.gathered, m.quantized, m.activations)
        return self.sweep, self.arm, str(self.planned.resources.ranks), *(f"{part / 1e9:.1f}" for part in parts)


def memory_of_arms(plan: Plan) -> Iterator[ArmMemory]:
    """Yield an estimate for each arm whose trials use GPUs; several estimates if the arm's trials differ in model."""
    seen = set()
    for member in plan.members:
        planned, cell = plan.trials[member.id], member.cell
        key = cell.sweep, cell.arm, planned.trial.model
        if planned.resources.gpus and key not in seen:
            seen.add(key)
            memory = estimate(planned.trial, planned.resources.ranks)
            yield ArmMemory(cell.sweep, cell.arm or "-", planned, memory)
