"""A paper as data: its numbers with their sources, and its tables and figures in our words and its order.

`papers/STUDY.yaml` holds it. Nothing of it is computed; what is lost in the paper is null there and None here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import yaml

from fewbits.common.from_dict import from_dict, one_of

FOLDER = Path(__file__).parents[1] / "papers"
BETTER = ("", "lower", "higher")
FIGURES = ("schematic", "curves", "heat map", "bars", "points")


@dataclass(frozen=True)
class Column:
    id: str
    title: str
    group: str = ""  # several columns' common head
    baseline: str | None = None  # the column that this one is compared with

    @property
    def heading(self) -> str:
        """Whole, by itself; tables show it in two parts again."""
        return f"{self.group}: {self.title}" if self.group else self.title


@dataclass(frozen=True)
class Row:
    id: str  # the metric's name in our results, where we have it
    title: str
    unit: str = ""
    better: str = ""
    values: tuple[float | None, ...] = ()
    text: tuple[str, ...] = ()  # in place of values
    source: str = ""  # the table's, where empty

    def __post_init__(self) -> None:
        one_of(f"row {self.id}: better", self.better, BETTER)
        if bool(self.values) == bool(self.text):
            raise ValueError(f"row {self.id}: either values or text is expected")


@dataclass(frozen=True)
class Table:
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
            if len(row.values or row.text) != len(self.columns):
                found = len(row.values or row.text)
                raise ValueError(f"{self.id}, {row.id}: {found} values in {len(self.columns)} columns")

    def value(self, row: str, column: str) -> float | None:
        one_of(f"{self.id}: row", row, [r.id for r in self.rows])
        one_of(f"{self.id}: column", column, [c.id for c in self.columns])
        (values,) = (r.values for r in self.rows if r.id == row)
        return values[[c.id for c in self.columns].index(column)] if values else None

    def change(self, row: str, column: str) -> float | None:
        """Relative to the column's baseline; None for a baseline itself and for what is lost."""
        (baseline,) = (c.baseline for c in self.columns if c.id == column)
        value, base = self.value(row, column), self.value(row, baseline) if baseline else None
        return None if value is None or base is None else (value - base) / abs(base)


@dataclass(frozen=True)
class Figure:
    id: str
    title: str
    kind: str
    caption: str
    x: str = ""
    y: tuple[str, ...] = ()  # of each panel
    series: tuple[str, ...] = ()
    finals: str | None = None  # the table that holds the curves' last values
    source: str = "printed"

    def __post_init__(self) -> None:
        one_of(f"{self.id}: kind", self.kind, FIGURES)
        if self.kind != "schematic" and not (self.x and self.y):
            raise ValueError(f"{self.id}: a {self.kind} has axes, x and y are expected")


@dataclass(frozen=True)
class Number:
    value: float
    source: str
    about: str
    unit: str = ""


@dataclass(frozen=True)
class Paper:
    study: str
    arxiv: str
    sources: dict[str, str]  # tags that say where a number is from, with their meaning
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    numbers: dict[str, Number] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what in (self.tables, self.figures):
            distinct(self.study, [thing.id for thing in what])
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
    """The paper of a study."""
    one_of("paper", study, sorted(path.stem for path in FOLDER.glob("*.yaml")))
    try:
        return from_dict(Paper, yaml.safe_load((FOLDER / f"{study}.yaml").read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"{study}.yaml: {error}") from None


def named(what: str, name: str, things: Sequence[T]) -> T:
    """Return the thing of this id; ValueError names the valid ones."""
    one_of(what, name, [thing.id for thing in things])
    return next(thing for thing in things if thing.id == name)


def distinct(where: str, names: Sequence[str]) -> None:
    """Raise ValueError where a name is there twice."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}: {name} is there twice")
