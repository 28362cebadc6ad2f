"""Read a paper's tables, figures and numbers from `studies/STUDY/paper.yaml`, with sources and in the paper's order.

Titles and captions are in our words. All numbers are the paper's, none is computed. A number that is missing from the
paper's text as we have it is null in the YAML file and None here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import yaml

from fewbits.common.from_dict import from_dict, one_of

STUDIES = Path(__file__).parents[2] / "studies"


@dataclass(frozen=True)
class Column:
    id: str
    title: str
    group: str = ""  # a heading above several columns
    baseline: str | None = None  # the id of the column that this one is compared with

    @property
    def heading(self) -> str:
        """`GROUP: TITLE`, or the title if there is no group; views/tables.py shows groups in a separate row."""
        return f"{self.group}: {self.title}" if self.group else self.title


@dataclass(frozen=True)
class Row:
    id: str  # the metric's name in our results, if they have this metric
    title: str
    unit: str = ""
    values: tuple[float | None, ...] = ()  # a number for each column
    text: tuple[str, ...] = ()  # instead of values: a text for each column
    source: str = ""  # a key of Paper.sources; if empty, the table's source

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.text):
            raise ValueError(f"row {self.id}: set exactly one of the keys values and text")


@dataclass(frozen=True)
class Table:
    id: str
    title: str
    source: str  # a key of Paper.sources
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        distinct(self.id, [c.id for c in self.columns])
        distinct(self.id, [r.id for r in self.rows])
        for column in self.columns:
            if column.baseline is not None:
                one_of(f"{self.id}: baseline of {column.id}:", column.baseline, [c.id for c in self.columns])
        for row in self.rows:
            if (count := len(row.values or row.text)) != len(self.columns):
                raise ValueError(f"{self.id}, {row.id}: {count} values for a table of {len(self.columns)} columns")

    def value(self, row: str, column: str) -> float | None:
        """Return the number in the row and column with these ids; None if it is missing, or if the row has text."""
        place = self.columns.index(named(f"{self.id}: column", column, self.columns))
        values = named(f"{self.id}: row", row, self.rows).values
        return values[place] if values else None

    def change(self, row: str, column: str) -> float | None:
        """Return (value - base) / |base|, where base is in the column's baseline column; None if one is missing."""
        baseline = named(f"{self.id}: column", column, self.columns).baseline
        value, base = self.value(row, column), self.value(row, baseline) if baseline else None
        return None if value is None or base is None else (value - base) / abs(base)


@dataclass(frozen=True)
class Figure:
    id: str
    title: str
    caption: str


@dataclass(frozen=True)
class Number:
    """A number that a paper gives outside of its tables."""

    value: float
    source: str  # a key of Paper.sources
    about: str  # what the number is
    unit: str = ""


@dataclass(frozen=True)
class Size:
    """The size of a model and its training in the paper."""

    parameters: float
    tokens: float


@dataclass(frozen=True)
class RecipeCost:
    """The comparison that measures what the whole recipe costs; a third of it is the margin of some claims."""

    arm: str
    baseline: str
    sweep: tuple[str, ...]  # the first sweep that has both arms; first those in which the claim is tested


@dataclass(frozen=True)
class Paper:
    """The numbers, tables and figures of a paper, and choices about its claims that were made before the runs."""

    study: str
    arxiv: str
    sources: dict[str, str]  # tag → where numbers with this tag are from, for example "printed"
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    numbers: dict[str, Number] = field(default_factory=dict)
    # The claims whose primary parts are corrected by Holm's method → the name of that part; "" for the first part.
    primary: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, Size] = field(default_factory=dict)  # `default`, and the sizes that claims name
    recipe_cost: RecipeCost | None = None

    def __post_init__(self) -> None:
        distinct(self.study, [*(table.id for table in self.tables), *(figure.id for figure in self.figures)])
        tagged = [(f"{t.id}, {r.id}", r.source or t.source) for t in self.tables for r in t.rows]
        for where, tag in [*tagged, *((name, number.source) for name, number in self.numbers.items())]:
            one_of(f"{where}: source", tag, self.sources)

    def table(self, name: str) -> Table:
        return named("table", name, self.tables)

    def figure(self, name: str) -> Figure:
        return named("figure", name, self.figures)


@cache
def paper(study: str) -> Paper:
    """Return the paper of a study; raise ValueError if its file is not valid."""
    one_of("paper", study, sorted(path.parent.name for path in STUDIES.glob("*/paper.yaml")))
    try:
        return from_dict(Paper, yaml.safe_load((STUDIES / study / "paper.yaml").read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"{study}.yaml: {error}") from None


class HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=HasId)


def named(kind: str, name: str, items: Sequence[T]) -> T:
    """Return the item whose id is `name`; if there is none, raise ValueError with the kind and the valid ids."""
    found = {item.id: item for item in items}
    one_of(kind, name, found)
    return found[name]


def distinct(where: str, names: Sequence[str]) -> None:
    """Raise ValueError if a name occurs more than once. where: the start of the error's message."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}: there are several entries with the name {name!r}")
