"""Select the part of a plan that a figure or table shows: the places of one sweep, or of a family of sweeps."""

from __future__ import annotations

from collections.abc import Mapping

from fewbits.analysis.engine.results.arms import ArmTable
from fewbits.analysis.engine.results.data import NotPlanned
from fewbits.analysis.engine.results.frames import Results

Where = Mapping[str, str]  # selected values of a sweep's axes
ANYWHERE: Where = {}


def not_planned(results: Results) -> NotPlanned:
    """Return the value that says that arms are not run at this scale."""
    return NotPlanned(f"not run at this scale ({results.scale_name})")


def sweep_places(results: Results, sweep: str, where: Where = ANYWHERE) -> Results | NotPlanned:
    """Return the places of one sweep with these axis values, including places without axes, such as trunks."""
    if sweep not in {planned.name for planned in results.plan.sweeps}:
        return not_planned(results)
    part = results.of_sweep(sweep)
    axes = set(where.items())
    members = tuple(m for m in part.members if not m.cell.axes or axes <= set(m.cell.axes))
    if not members:
        return not_planned(results)
    return results.remembered(f"places {sweep} {sorted(axes)}", lambda: part.of_places(members)) if axes else part


def family_places(results: Results, table: ArmTable, sweep: str) -> Results:
    """Return the places of all sweeps in the sweep's family; without places if the scale has none of them."""
    sweeps = table.family(sweep)
    return results.remembered(
        f"places of {', '.join(sweeps)}",
        lambda: results.of_places(tuple(m for m in results.members if m.cell.sweep in sweeps)),
    )


def trial_ids(results: Results, arm: str, where: Where = ANYWHERE) -> dict[int, str]:
    """Return the ids of an arm's trials by seed; empty if the plan does not have the arm."""
    axes = set(where.items())
    return {m.cell.seed: m.id for m in results.members if m.cell.arm == arm and axes <= set(m.cell.axes)}
