"""Select places of a plan: those that a figure or table shows, and those in which arms are compared.

Arms are compared in the first of the given sweeps that has all of them. If no sweep is given, they are compared in the
first sweep that has them, or else over all sweeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fewbits.analysis.engine.results.arms import ArmTable
from fewbits.analysis.engine.results.data import NotPlanned
from fewbits.analysis.engine.results.frames import Results

Where = Mapping[str, str]  # axis → selected value
ANYWHERE: Where = {}  # no restriction to axis values
PROBES = "probes"  # the sweep of probes, in which the arm X is probe-X
PROBE, END = "probe-", {"checkpoint": "end"}  # the start of a probe's name, and the trunk's last checkpoint


def not_planned(results: Results) -> NotPlanned:
    """Return NotPlanned with the scale of these results as the reason."""
    return NotPlanned(f"not run at this scale ({results.scale_name})")


def sweep_places(results: Results, sweep: str, where: Where = ANYWHERE) -> Results | NotPlanned:
    """Return the results of those places of one sweep that have the axis values `where`, or that have no axes.

    A place has no axes if its arm, for example a trunk, does not use the axes of the sweep.
    """
    if sweep not in {planned.name for planned in results.plan.sweeps}:
        return not_planned(results)
    part = results.of_sweep(sweep)
    axes = set(where.items())
    if not (members := tuple(m for m in part.members if not m.cell.axes or axes <= set(m.cell.axes))):
        return not_planned(results)
    return results.remembered(f"places {sweep} {sorted(axes)}", lambda: part.of_places(members)) if axes else part


def family_places(results: Results, table: ArmTable, sweep: str) -> Results:
    """Return the results of all places of the sweeps that are in the same family as `sweep` (see `ArmTable`)."""
    sweeps = table.family(sweep)
    members = tuple(m for m in results.members if m.cell.sweep in sweeps)
    return results.remembered(f"places of {', '.join(sweeps)}", lambda: results.of_places(members))


def trial_ids(results: Results, arm: str, where: Where = ANYWHERE) -> dict[int, str]:
    """Return {seed: trial id} for an arm with these axis values; {} if the plan does not have the arm."""
    axes = set(where.items())
    return {m.cell.seed: m.id for m in results.members if m.cell.arm == arm and axes <= set(m.cell.axes)}


# -------------------------------------------------------------------------------- comparisons


@dataclass(frozen=True)
class Scope:
    """The results in which arms are compared, with the arms' names there and the axis values of arm and baseline."""

    results: Results
    arms: tuple[str, ...]
    where: Where
    base: Where | None


def scope_of(
    results: Results,
    arms: Sequence[str],
    sweeps: Sequence[str] = (),
    where: Where = ANYWHERE,
    base: Where | None = None,
) -> Scope | None:
    """Return where to compare these arms (claims/schema.py says how they are written); None if the plan lacks one.

    where: axis values that the first arm needs. base: axis values that the other arms need; None: those of the arm,
    as far as the other arms have these axes.
    """
    planned = dict.fromkeys(member.cell.sweep for member in results.members)
    for name in sweeps or planned:
        if name not in planned:
            continue
        part, probed = results.of_sweep(name), name == PROBES and bool(sweeps)
        if probed and len(sweeps) > 1 and not _has_trunk(part):
            continue
        end = END if probed else {}
        other = None if base is None else {**end, **base}
        if found := _found(part, arms, {**end, **where}, other, PROBE if probed else ""):
            return found
    return None if sweeps else _found(results, arms, where, base, "")


def _found(scope: Results, arms: Sequence[str], where: Where, base: Where | None, prefix: str) -> Scope | None:
    named = [[one if one.startswith(prefix) else prefix + one for one in arm.split("|")] for arm in arms]
    for choice in range(max(map(len, named))):
        names = tuple(alike[min(choice, len(alike) - 1)] for alike in named)
        if all(scope.has(name, base if place else where) for place, name in enumerate(names)):
            return Scope(scope, names, where, base)
    return None


def _has_trunk(scope: Results) -> bool:
    parents = {scope.plan.trials[member.id].parent for member in scope.members}
    return any(parent in scope.plan.trials for parent in parents if parent is not None)


def pairs_of(found: Scope) -> list[tuple[str, str]]:
    """Return (trial of the arm, trial of the baseline) for each pair in the plan.

    The two have equal seeds and, unless the baseline has axis values of its own, equal values of all axes that the
    baseline has.
    """
    arm, baseline = ([member for member in found.results.members if member.cell.arm == name] for name in found.arms)
    where, base = set(found.where.items()), None if found.base is None else set(found.base.items())
    pairs = {
        (own.id, other.id)
        for own in arm
        if where <= set(own.cell.axes)
        for other in baseline
        if other.cell.seed == own.cell.seed
        if (set(other.cell.axes) <= set(own.cell.axes) if base is None else base <= set(other.cell.axes))
    }
    return sorted(pairs)
