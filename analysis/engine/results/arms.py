"""The table of a study's arms, `studies/STUDY/arms.yaml`: how reports show each arm, and which sweeps are compared.

A sweep file says how an arm is trained; this table says how tables and figures name and draw it. Reports show an arm
that is not in the table by its name. For a study without the file, the table is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

import yaml

from fewbits.analysis.engine.results.paper import distinct
from fewbits.common.from_dict import from_dict, one_of

STUDIES = Path(__file__).parents[2] / "studies"
FILE = "arms.yaml"
BASELINE = "bf16"  # the arm that others are compared with, unless the table names another
AGAIN = "bf16-again"  # for A/A comparisons: the same mathematics as BF16, with sums that round in another order


@dataclass(frozen=True)
class Arm:
    """An arm as reports show it."""

    name: str
    title: str  # its name in tables
    label: str = ""  # its short name in figures and comparisons; if empty, the title
    style: int | None = None  # its index in the figures' list of styles; without one, a figure assigns a free style
    baseline: str = BASELINE  # the arm that it is compared with; "" if it is not compared

    @property
    def short(self) -> str:
        return self.label or self.title


@dataclass(frozen=True)
class Group:
    """A sweep whose arms are listed in the table and the figure of all effects."""

    sweep: str
    prefix: str = ""  # stands before the arms' names
    where: dict[str, str] = field(default_factory=dict)  # selected values of the sweep's axes


@dataclass(frozen=True)
class ArmTable:
    """The arms of a study and the sweeps that they are trained in.

    A family is a list of sweeps of one model whose arms start from the same trunks. An arm that is in several sweeps of
    a family counts as one arm. A sweep that is in no family is a family by itself.
    """

    study: str
    arms: tuple[Arm, ...] = ()
    groups: tuple[Group, ...] = ()
    families: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)  # arms that a table or figure of the study lists
    trunks: dict[str, str] = field(default_factory=dict)  # labels of the arms that other arms branch from
    places: dict[str, dict[str, str]] = field(default_factory=dict)  # combinations of axis values, by a short name
    # For each of the paper's tables, the pattern of its columns' ids, with `{arm}` and `{place}` (a name in `places`).
    # A table whose pattern has no `{place}` shows the first place only.
    columns: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        distinct(f"{self.study}, arms", names)
        for name, listed in self.lists.items():
            for arm_name in listed:
                one_of(f"{self.study}, lists, {name}", arm_name, names)
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
        """Return the text that precedes the labels of a sweep's arms, for all values of its axes."""
        return next((group.prefix for group in self.groups if group.sweep == sweep and not group.where), "")

    def family(self, sweep: str) -> tuple[str, ...]:
        """Return the sweeps of this sweep's family, including itself."""
        return next((sweeps for sweeps in self.families.values() if sweep in sweeps), (sweep,))

    def column(self, table: str, arm: str, place: str = "") -> str:
        """Return the id of the column of a paper's table that shows the arm at a place of `places`.

        Return "" if the table does not show this place.
        """
        pattern = self.columns.get(table, "{arm}")
        if "{place}" not in pattern and place not in ("", *list(self.places)[:1]):
            return ""
        return pattern.format(arm=arm, place=place)

    def of_column(self, table: str, column: str) -> tuple[str, dict[str, str]]:
        """Return the arm and the axis values that a column of a paper's table shows.

        Raise ValueError if no arm belongs to the column.
        """
        for arm, (place, where) in product(self.arms, (self.places or {"": {}}).items()):
            if self.column(table, arm.name, place) == column:
                return arm.name, where
        raise ValueError(f"{self.study}, {table}: no arm of {FILE} belongs to column {column}")

    def place(self, where: dict[str, str]) -> str:
        """Return the short name of a combination of axis values; "" if `places` does not have it."""
        return next((name for name, axes in self.places.items() if axes == where), "")


@cache
def arm_table(study: str) -> ArmTable:
    """Return the table of a study; it is empty if the study has no file."""
    path = STUDIES / study / FILE
    if not path.is_file():
        return ArmTable(study)
    try:
        return from_dict(ArmTable, {"study": study, **yaml.safe_load(path.read_text("utf-8"))})
    except ValueError as error:
        raise ValueError(f"{study}/{FILE}: {error}") from None
