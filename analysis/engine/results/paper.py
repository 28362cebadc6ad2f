"""A paper as data, from `papers/STUDY.yaml`: its numbers with their sources, and its tables and figures in its order.

Titles and captions are in our words. No number is computed; a number that is missing from the paper's text as we have
it is null in the file and None here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import yaml

from fewbits.common.from_dict import from_dict, one_of

FOLDER = Path(__file__).parents[2] / "papers"
BETTER = ("", "lower", "higher")
FIGURES = ("schematic", "curves", "heat map", "bars", "points")


@dataclass(frozen=True)
class Column:
    """A column of a paper's table."""

    id: str
    title: str
    group: str = ""  # the common head of several columns
    baseline: str | None = None  # the column that this one is compared with

    @property
    def heading(self) -> str:
        """Group and title as one text, which views/tables.py splits again for the head of a table."""
        return f"{self.group}: {self.title}" if self.group else self.title


@dataclass(frozen=True)
class Row:
    """A row of a paper's table."""

    id: str  # the metric's name in our results, if they have it
    title: str
    unit: str = ""
    better: str = ""
    values: tuple[float | None, ...] = ()
    text: tuple[str, ...] = ()  # the cells of a row without numbers, instead of values
    source: str = ""  # if empty, the table's

    def __post_init__(self) -> None:
        one_of(f"row {self.id}: better", self.better, BETTER)
        if bool(self.values) == bool(self.text):
            raise ValueError(f"row {self.id}: give either values or text")


@dataclass(frozen=True)
class Table:
    """A table of a paper."""

    id: str
    title: str
    source: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        distinct(self.id, [c.id for c in self.columns])
        distinct(self.id, [r.id for r in self.rows])
        for column in self.columns:
            if column.baseline is not None:
                one_of(f"{self.id}: baseline of {column.id}:", column.baseline, [c.id for c in self.columns])
        for row in self.rows:
            count = len(row.values or row.text)
            if count != len(self.columns):
                raise ValueError(f"{self.id}, {row.id}: {count} values in {len(self.columns)} columns")

    def value(self, row: str, column: str) -> float | None:
        """Return a cell's number; None if the paper's text lacks it, or the row has text."""
        one_of(f"{self.id}: row", row, [r.id for r in self.rows])
        one_of(f"{self.id}: column", column, [c.id for c in self.columns])
        (values,) = (r.values for r in self.rows if r.id == row)
        return values[[c.id for c in self.columns].index(column)] if values else None

    def change(self, row: str, column: str) -> float | None:
        """Return a cell's change from its column's baseline, as a fraction; None if one of the numbers is missing.

        A column without a baseline has no changes, so None is returned for it, too.
        """
        (baseline,) = (c.baseline for c in self.columns if c.id == column)
        value, base = self.value(row, column), self.value(row, baseline) if baseline else None
        return None if value is None or base is None else (value - base) / abs(base)


@dataclass(frozen=True)
class Figure:
    """A figure of a paper."""

    id: str
    title: str
    kind: str
    caption: str
    x: str = ""
    y: tuple[str, ...] = ()  # the y axis of each panel
    series: tuple[str, ...] = ()
    finals: str | None = None  # the table that has the curves' last values
    source: str = "printed"

    def __post_init__(self) -> None:
        one_of(f"{self.id}: kind", self.kind, FIGURES)
        if self.kind != "schematic" and not (self.x and self.y):
            raise ValueError(f"{self.id}: a figure of kind {self.kind} needs its axes, x and y")


@dataclass(frozen=True)
class Number:
    """A number that a paper gives outside of its tables."""

    value: float
    source: str
    about: str
    unit: str = ""


@dataclass(frozen=True)
class Paper:
    """The numbers, tables and figures of a paper."""

    study: str
    arxiv: str
    sources: dict[str, str]  # the tags that say where a number is from, each with its meaning
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    numbers: dict[str, Number] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for items in (self.tables, self.figures):
            distinct(self.study, [item.id for item in items])
        tagged = [(t.id, t.source) for t in self.tables] + [(f.id, f.source) for f in self.figures]
        tagged += [(f"{t.id}, {r.id}", r.source or t.source) for t in self.tables for r in t.rows]
        for where, tag in [*tagged, *((name, number.source) for name, number in self.numbers.items())]:
            one_of(f"{where}: source", tag, self.sources)
        for figure in self.figures:
            if figure.finals is not None:
                one_of(f"{figure.id}: finals", figure.finals, [t.id for t in self.tables])

    def table(self, name: str) -> Table:
        return named("table", name, self.tables)

    def figure(self, name: str) -> Figure:
        return named("figure", name, self.figures)


class HasId(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=HasId)


@cache
def paper(study: str) -> Paper:
    """Return the paper of a study; raise ValueError if its file is not valid."""
    one_of("paper", study, sorted(path.stem for path in FOLDER.glob("*.yaml")))
    try:
        return from_dict(Paper, yaml.safe_load((FOLDER / f"{study}.yaml").read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"{study}.yaml: {error}") from None


def named(kind: str, name: str, items: Sequence[T]) -> T:
    """Return the item with this id; ValueError names the valid ids."""
    one_of(kind, name, [item.id for item in items])
    return next(item for item in items if item.id == name)


def distinct(where: str, names: Sequence[str]) -> None:
    """Raise ValueError if a name occurs more than once."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}: there are several entries with the name {name!r}")
