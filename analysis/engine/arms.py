"""The table of a study's arms, `studies/STUDY/arms.yaml`: what reports call each arm, and which sweeps compare.

A sweep file says how an arm is trained; this table says how tables and figures name and draw it. An arm that the table
does not have is called by its name. A study without a table has no arms of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

import yaml

from fewbits.common.from_dict import from_dict, one_of

STUDIES = Path(__file__).parents[1] / "studies"
FILE = "arms.yaml"
BASELINE = "bf16"  # what arms are compared with, unless the table says otherwise
AGAIN = "bf16-again"  # A/A: the same mathematics as BF16, its sums rounded in another order


@dataclass(frozen=True)
class Arm:
    """An arm as reports show it. Its baseline is the arm that it is compared with; "" where it is with none."""

    name: str
    title: str  # in tables
    label: str = ""  # in figures and comparisons, short; the title where it is empty
    style: int | None = None  # place in the figures' list of styles; a figure gives the others those that are free
    baseline: str = BASELINE

    @property
    def short(self) -> str:
        return self.label or self.title


@dataclass(frozen=True)
class Group:
    """A sweep whose arms the table and the figure of all effects list, `prefix` before their names."""

    sweep: str
    prefix: str = ""
    where: dict[str, str] = field(default_factory=dict)  # values of the sweep's axes


@dataclass(frozen=True)
class ArmTable:
    """The arms of a study and the sweeps that they are trained in.

    A family holds sweeps of one model whose arms start from the same trunks, so that an arm of several of its sweeps is
    one arm and all of them tell how far chance moves a pair. A sweep that no family names is one by itself.
    """

    study: str
    arms: tuple[Arm, ...] = ()
    groups: tuple[Group, ...] = ()
    families: dict[str, tuple[str, ...]] = field(default_factory=dict)
    trunks: dict[str, str] = field(default_factory=dict)  # arms that others branch from, with their labels
    places: dict[str, dict[str, str]] = field(default_factory=dict)  # combinations of axes, by a short name
    # Ids of the columns of the paper's tables, made of `{arm}` and `{place}`; without `{place}` a table is about the
    # first place alone.
    columns: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{self.study}: arm {name} is there twice")
        for arm in self.arms:
            if arm.baseline not in (BASELINE, ""):
                one_of(f"{self.study}, arm {arm.name}: baseline", arm.baseline, names)

    def arm(self, name: str) -> Arm:
        return next((arm for arm in self.arms if arm.name == name), Arm(name, name))

    def title(self, name: str) -> str:
        return self.arm(name).title

    def label(self, name: str) -> str:
        return self.arm(name).short

    def prefix(self, sweep: str) -> str:
        """Return what stands before the names of a sweep's arms, whatever the values of its axes."""
        return next((group.prefix for group in self.groups if group.sweep == sweep and not group.where), "")

    def family(self, sweep: str) -> tuple[str, ...]:
        """Return the sweeps that compare with this one, itself among them."""
        return next((sweeps for sweeps in self.families.values() if sweep in sweeps), (sweep,))

    def column(self, table: str, arm: str, place: str = "") -> str:
        """Return the id of the paper's column for an arm in one of the places; "" where the table is not about it."""
        pattern = self.columns.get(table, "{arm}")
        if "{place}" not in pattern and place not in ("", *list(self.places)[:1]):
            return ""
        return pattern.format(arm=arm, place=place)

    def of_column(self, table: str, column: str) -> tuple[str, dict[str, str]]:
        """Return the arm and the values of axes that stand in a column of the paper's table."""
        for arm, (place, where) in product(self.arms, (self.places or {"": {}}).items()):
            if self.column(table, arm.name, place) == column:
                return arm.name, where
        raise ValueError(f"{self.study}, {table}: no arm stands in column {column}; see {FILE}")

    def place(self, where: dict[str, str]) -> str:
        """Return the short name of a combination of axes."""
        return next((name for name, axes in self.places.items() if axes == where), "")


@cache
def arm_table(study: str) -> ArmTable:
    """Return the table of a study; an empty one where the study has none."""
    path = STUDIES / study / FILE
    if not path.is_file():
        return ArmTable(study)
    try:
        return from_dict(ArmTable, {"study": study, **yaml.safe_load(path.read_text("utf-8"))})
    except ValueError as error:
        raise ValueError(f"{study}/{FILE}: {error}") from None
