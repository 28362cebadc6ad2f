"""Register functions that make a study's tables and figures from the results of its trials.

    @table("mor", "Table 2")
    def table_2(results: Results) -> Table: …

    @figure("mor", "Figure 5")
    def figure_5(results: Results) -> Picture: …

Titles of the paper's tables and figures come from `studies/STUDY/paper.yaml`. Those of our own are registered with
a title; reports show it after the paper's and mark it as ours. Tables and figures that `tables.yaml` and `figures.yaml`
declare need no function. Claims are not registered; `studies/STUDY/claims.yaml` has them (engine/claims/schema.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Generic, TypeVar

from fewbits.analysis.engine.results.paper import STUDIES as FOLDER
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.report.items import MakeFigure, MakeTable
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.studies import STUDIES

M = TypeVar("M", MakeTable, MakeFigure)


@dataclass(frozen=True)
class Entry(Generic[M]):
    """A registered table or figure of a study."""

    id: str
    title: str
    of_paper: bool  # false for a table or figure of our own
    make: M  # the function that makes it from the results


@dataclass
class StudyRegistry:
    """The tables and figures of one study. "Our own" are those that the paper does not have."""

    study: str
    loaded: bool = False  # whether the tables and figures of tables.yaml and figures.yaml are registered
    _tables: dict[str, Entry[MakeTable]] = field(default_factory=dict)
    _figures: dict[str, Entry[MakeFigure]] = field(default_factory=dict)

    @property
    def tables(self) -> list[Entry[MakeTable]]:
        """The registered tables: the paper's in the paper's order, then our own in the order of registration."""
        return [self._tables[name] for name in self.table_ids if name in self._tables]

    @property
    def figures(self) -> list[Entry[MakeFigure]]:
        """The registered figures: the paper's in the paper's order, then our own in the order of registration."""
        return [self._figures[name] for name in self.figure_ids if name in self._figures]

    @property
    def table_ids(self) -> list[str]:
        """The ids of all tables of the paper, registered or not, then of our own."""
        return list(dict.fromkeys([*(table.id for table in paper(self.study).tables), *self._tables]))

    @property
    def figure_ids(self) -> list[str]:
        """The ids of all figures of the paper, registered or not, then of our own."""
        return list(dict.fromkeys([*(figure.id for figure in paper(self.study).figures), *self._figures]))

    @property
    def missing(self) -> list[str]:
        """The ids of the paper's tables and figures for which no function is registered."""
        names = [*self.table_ids, *self.figure_ids]
        return [name for name in names if name not in self._tables and name not in self._figures]

    def add_table(self, name: str, make: MakeTable, title: str | None = None) -> None:
        """Register the function that makes the table with the id `name`. title: only for a table of our own.

        Raise ValueError if the id is already registered or, without a title, if the paper has no such table.
        """
        printed = paper(self.study).table(name).title if title is None else title
        self._check(self._tables, name)
        self._tables[name] = Entry(name, printed, title is None, make)

    def add_figure(self, name: str, make: MakeFigure, title: str | None = None) -> None:
        """Register the function that makes the figure with the id `name`. title: only for a figure of our own.

        Raise ValueError if the id is already registered or, without a title, if the paper has no such figure.
        """
        printed = paper(self.study).figure(name).title if title is None else title
        self._check(self._figures, name)
        self._figures[name] = Entry(name, printed, title is None, make)

    def _check(self, entries: dict[str, Entry[M]], name: str) -> None:
        if name in entries:
            raise ValueError(f"{self.study}: {name} is registered twice; give each table and figure an id of its own")


_REGISTRIES: dict[str, StudyRegistry] = {}


def study_registry(study: str) -> StudyRegistry:
    """Return the registry of a study with all its tables and figures: those of its modules and of its YAML files."""
    registry = _registry(study)
    load(registry)
    return registry


def load(registry: StudyRegistry) -> None:
    """Register a study's tables and figures: import the study's modules, and read tables.yaml and figures.yaml.

    The modules register functions with the decorators `@table` and `@figure`. A second call changes nothing.
    """
    from fewbits.analysis.report.declared import declared_figures, declared_tables

    for path in sorted((FOLDER / registry.study).glob("*.py")):
        if path.stem == "notebook":
            continue
        import_module(f"fewbits.analysis.studies.{registry.study}.{path.stem}")
    if registry.loaded:
        return
    registry.loaded = True
    for name, made, table in declared_tables(registry.study):
        registry.add_table(name, table, made)
    for name, title, figure in declared_figures(registry.study):
        registry.add_figure(name, figure, title)


def table(study: str, name: str, title: str | None = None) -> Callable[[MakeTable], MakeTable]:
    """Register the decorated function as the table with the id `name`. title: only for a table of our own."""

    def register(make: MakeTable) -> MakeTable:
        _registry(study).add_table(name, make, title)
        return make

    return register


def figure(study: str, name: str, title: str | None = None) -> Callable[[MakeFigure], MakeFigure]:
    """Register the decorated function as the figure with the id `name`. title: only for a figure of our own."""

    def register(make: MakeFigure) -> MakeFigure:
        _registry(study).add_figure(name, make, title)
        return make

    return register


def _registry(study: str) -> StudyRegistry:
    one_of("study", study, STUDIES)
    return _REGISTRIES.setdefault(study, StudyRegistry(study))
