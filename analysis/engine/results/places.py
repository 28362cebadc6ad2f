"""Read `studies/STUDY/arms.yaml`, and select places of a plan: those that a figure shows, or that are compared.

arms.yaml has the titles and styles of a study's arms in reports, and families of its sweeps. An arm that is not in it
is shown by its name in the sweep file.

Arms are compared in the first of the given sweeps that has all of them. If no sweep is given, they are compared in the
first sweep that has them, or else over all sweeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import yaml

from fewbits.analysis.engine.results.data import NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import STUDIES, distinct
from fewbits.common.from_dict import from_dict, one_of

FILE = "arms.yaml"
BASELINE = "bf16"  # the name of the default baseline
AGAIN = "bf16-again"  # the arm of A/A comparisons: like bf16, but its sums are rounded in another order


@dataclass(frozen=True)
class Arm:
    """The names and the style of an arm in reports, and its baseline."""

    name: str  # the name in the sweep file
    title: str  # the name in tables
    label: str = ""  # the short name in figures and comparisons; if empty, the title
    style: int | None = None  # the index in the figures' list of line styles; None: each figure chooses a free style
    baseline: str = BASELINE  # the arm that this one is compared with; "" if it is not compared

    @property
    def short(self) -> str:
        return self.label or self.title


@dataclass(frozen=True)
class Group:
    """A sweep in the report's figure of effects, which shows the effect of each arm of the sweep on the loss."""

    sweep: str
    prefix: str = ""  # text before the arms' labels
    where: dict[str, str] = field(default_factory=dict)  # axis → value: only trials with these axis values appear


@dataclass(frozen=True)
class ArmTable:
    """The content of arms.yaml.

    A family is a list of sweeps of one model whose arms start from the same trunks. An arm that is in several sweeps of
    a family counts as one arm. A sweep that is in no family is a family by itself.
    """

    study: str
    arms: tuple[Arm, ...] = ()
    groups: tuple[Group, ...] = ()
    families: dict[str, tuple[str, ...]] = field(default_factory=dict)  # family → its sweeps
    trunks: dict[str, str] = field(default_factory=dict)  # arms that other arms branch from → their labels
    places: dict[str, dict[str, str]] = field(default_factory=dict)  # short name → a combination of axis values
    # The id of a table in the paper → the pattern of its columns' ids. The pattern has `{arm}` and may have `{place}`
    # (a key of `places`). A table whose pattern has no `{place}` shows only the first combination in `places`.
    columns: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        distinct(f"{self.study}, arms", names)
        for arm in self.arms:
            if arm.baseline not in (BASELINE, ""):
                one_of(f"{self.study}, arm {arm.name}: baseline", arm.baseline, names)

    def arm(self, name: str) -> Arm:
        """Return the arm with this name; if the table lacks it, an arm whose title is its name."""
        return next((arm for arm in self.arms if arm.name == name), Arm(name, name))

    def title(self, name: str) -> str:
        return self.arm(name).title

    def label(self, name: str) -> str:
        return self.arm(name).short

    def prefix(self, sweep: str) -> str:
        """Return the text before the labels of the sweep's arms in the figure of effects, or "" if there is none."""
        return next((group.prefix for group in self.groups if group.sweep == sweep and not group.where), "")

    def family(self, sweep: str) -> tuple[str, ...]:
        return next((sweeps for sweeps in self.families.values() if sweep in sweeps), (sweep,))

    def column(self, table: str, arm: str, place: str = "") -> str:
        """Return the id of the paper's column with this arm at this place (a key of `places`); "" if there is none."""
        pattern = self.columns.get(table, "{arm}")
        if "{place}" not in pattern and place not in ("", *list(self.places)[:1]):
            return ""
        return pattern.format(arm=arm, place=place)

    def of_column(self, table: str, column: str) -> tuple[str, dict[str, str]]:
        """Return (name of the arm, {axis: value}) for the column with this id in the paper's table with this id."""
        for arm, (place, where) in product(self.arms, (self.places or {"": {}}).items()):
            if self.column(table, arm.name, place) == column:
                return arm.name, where
        raise ValueError(f"{self.study}, {table}: no arm in {FILE} belongs to the paper's column {column}; add one")

    def place(self, where: dict[str, str]) -> str:
        """Return the short name of these axis values (axis → value), a key of `places`; "" if they have none."""
        return next((name for name, axes in self.places.items() if axes == where), "")


@cache
def arm_table(study: str) -> ArmTable:
    """Return the table of a study's arms; it is empty if the study has no arms.yaml. Invalid files raise ValueError."""
    path = STUDIES / study / FILE
    if not path.is_file():
        return ArmTable(study)
    try:
        return from_dict(ArmTable, {"study": study, **yaml.safe_load(path.read_text("utf-8"))})
    except ValueError as error:
        raise ValueError(f"{study}/{FILE}: {error}") from None


# ------------------------------------------------------------------------------------------------ places

Where = Mapping[str, str]  # axis → selected value
ANYWHERE: Where = {}  # no restriction to axis values
PROBES = "probes"  # the sweep of probes, in which the arm X is probe-X
PROBE, END = "probe-", {"checkpoint": "end"}  # the start of a probe's name, and the trunk's last checkpoint


def not_planned(results: Results) -> NotPlanned:
    return NotPlanned(f"not run at this scale ({results.scale_name})")


def sweep_places(results: Results, sweep: str, where: Where = ANYWHERE) -> Results | NotPlanned:
    """Return the results of the places of a sweep that have these axis values, or no axes, like some trunks."""
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
    """Return (trial of the arm, trial of the baseline) for each pair in the plan: equal seeds and common axes."""
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
