"""Select the places of a plan that a figure or table shows: places of one sweep, or of a family of sweeps."""

from __future__ import annotations

from collections.abc import Mapping

from fewbits.analysis.engine.results.arms import ArmTable
from fewbits.analysis.engine.results.data import NotPlanned
from fewbits.analysis.engine.results.frames import Results

Where = Mapping[str, str]  # axis → selected value
ANYWHERE: Where = {}  # no restriction to axis values


def not_planned(results: Results) -> NotPlanned:
    """Return NotPlanned with the reason "not run at this scale" and the name of the scale of these results."""
    return NotPlanned(f"not run at this scale ({results.scale_name})")


def sweep_places(results: Results, sweep: str, where: Where = ANYWHERE) -> Results | NotPlanned:
    """Return the results of those places of one sweep that have the axis values `where`, or that have no axes.

    A place has no axes if its arm, for example a trunk, does not use the axes of the sweep. Return NotPlanned if there
    is no such place.
    """
    if sweep not in {planned.name for planned in results.plan.sweeps}:
        return not_planned(results)
    part = results.of_sweep(sweep)
    axes = set(where.items())
    members = tuple(m for m in part.members if not m.cell.axes or axes <= set(m.cell.axes))
    if not members:
        return not_planned(results)
    return results.remembered(f"places {sweep} {sorted(axes)}", lambda: part.of_places(members)) if axes else part


def family_places(results: Results, table: ArmTable, sweep: str) -> Results:
    """Return the results of all places of the sweeps that are in the same family as `sweep`.

    A family is a group of sweeps of one model whose arms start from the same trunks (see `ArmTable`). If the plan has
    none of these sweeps, the returned results have no places.
    """
    sweeps = table.family(sweep)
    return results.remembered(
        f"places of {', '.join(sweeps)}",
        lambda: results.of_places(tuple(m for m in results.members if m.cell.sweep in sweeps)),
    )


def trial_ids(results: Results, arm: str, where: Where = ANYWHERE) -> dict[int, str]:
    """Return {seed: trial id} for an arm with these axis values; {} if the plan does not have the arm."""
    axes = set(where.items())
    return {m.cell.seed: m.id for m in results.members if m.cell.arm == arm and axes <= set(m.cell.axes)}
