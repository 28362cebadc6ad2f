"""Places: the part of a plan that a figure or table is about, one sweep or the sweeps that compare with it."""

from __future__ import annotations

from collections.abc import Mapping

from fewbits.analysis.engine.arms import ArmTable
from fewbits.analysis.engine.data import NotPlanned
from fewbits.analysis.engine.frames import Results

Where = Mapping[str, str]  # values of a sweep's axes
ANYWHERE: Where = {}


def not_planned(results: Results) -> NotPlanned:
    """Return what stands in place of arms that this scale leaves out."""
    return NotPlanned(f"not run at this scale ({results.scale_name})")


def sweep_places(results: Results, sweep: str, where: Where = ANYWHERE) -> Results | NotPlanned:
    """Return the places of one sweep with these values of its axes; trunks that have no axes are among them."""
    if sweep not in {one.name for one in results.plan.sweeps}:
        return not_planned(results)
    one = results.of_sweep(sweep)
    axes = set(where.items())
    members = tuple(m for m in one.members if not m.cell.axes or axes <= set(m.cell.axes))
    if not members:
        return not_planned(results)
    return results.remembered(f"places {sweep} {sorted(axes)}", lambda: one.of_places(members)) if axes else one


def family_places(results: Results, table: ArmTable, sweep: str) -> Results:
    """Return the places of all sweeps that compare with this one; of none where the scale leaves them out."""
    sweeps = table.family(sweep)
    return results.remembered(
        f"places of {', '.join(sweeps)}",
        lambda: results.of_places(tuple(m for m in results.members if m.cell.sweep in sweeps)),
    )


def trial_ids(results: Results, arm: str, where: Where = ANYWHERE) -> dict[int, str]:
    """Return the ids of an arm's trials by seed; none where it is not run."""
    axes = set(where.items())
    return {m.cell.seed: m.id for m in results.members if m.cell.arm == arm and axes <= set(m.cell.axes)}
