"""The registry of a study's tables and figures, each of which is a function of the results.

    @table("mor", "Table 2")
    def table_2(results: Results) -> Table: …

    @figure("mor", "Figure 5")
    def figure_5(results: Results) -> Picture: …

Titles of the paper's tables and figures come from the paper's data file. Our own are registered with a title; they come
after the paper's and are marked as ours. Tables and figures that `tables.yaml` and `figures.yaml` declare need no
function. Claims are not registered but data (engine/claims/schema.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Generic, TypeVar

from fewbits.analysis.engine.results.arms import STUDIES as FOLDER
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.report.items import MakeFigure, MakeTable
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.studies import STUDIES

M = TypeVar("M", MakeTable, MakeFigure)


@dataclass(frozen=True)
class Entry(Generic[M]):
    """A table or figure of a study."""

    id: str
    title: str
    of_paper: bool  # false for a table or figure of our own
    make: M


@dataclass
class StudyRegistry:
    """The tables and figures of one study."""

    study: str
    loaded: bool = False
    _tables: dict[str, Entry[MakeTable]] = field(default_factory=dict)
    _figures: dict[str, Entry[MakeFigure]] = field(default_factory=dict)

    @property
    def tables(self) -> list[Entry[MakeTable]]:
        """The paper's tables in its order, then our own in the order of registration."""
        return [self._tables[name] for name in self.table_ids if name in self._tables]

    @property
    def figures(self) -> list[Entry[MakeFigure]]:
        """The paper's figures in its order, then our own in the order of registration."""
        return [self._figures[name] for name in self.figure_ids if name in self._figures]

    @property
    def table_ids(self) -> list[str]:
        """The ids of the paper's tables, registered or not, and of our own."""
        return list(dict.fromkeys([*(table.id for table in paper(self.study).tables), *self._tables]))

    @property
    def figure_ids(self) -> list[str]:
        """The ids of the paper's figures, registered or not, and of our own."""
        return list(dict.fromkeys([*(figure.id for figure in paper(self.study).figures), *self._figures]))

    @property
    def missing(self) -> list[str]:
        """The ids of the paper's tables and figures for which nothing is registered."""
        names = [*self.table_ids, *self.figure_ids]
        return [name for name in names if name not in self._tables and name not in self._figures]

    def add_table(self, name: str, make: MakeTable, title: str | None = None) -> None:
        """Register a table of the paper or, with a title, of our own."""
        printed = paper(self.study).table(name).title if title is None else title
        self._check(self._tables, name)
        self._tables[name] = Entry(name, printed, title is None, make)

    def add_figure(self, name: str, make: MakeFigure, title: str | None = None) -> None:
        """Register a figure of the paper or, with a title, of our own."""
        printed = paper(self.study).figure(name).title if title is None else title
        self._check(self._figures, name)
        self._figures[name] = Entry(name, printed, title is None, make)

    def _check(self, entries: dict[str, Entry[M]], name: str) -> None:
        if name in entries:
            raise ValueError(f"{self.study}: {name} is registered twice")


_REGISTRIES: dict[str, StudyRegistry] = {}


def study_registry(study: str) -> StudyRegistry:
    """Return the registry of a study, with everything that its modules and its `figures.yaml` register."""
    registry = _registry(study)
    load(registry)
    return registry


def load(registry: StudyRegistry) -> None:
    """Import the study's modules, which register their functions, and register its declared tables and figures.

    A second call changes nothing.
    """
    from fewbits.analysis.report.declared import declared_figures, declared_tables

    for path in sorted((FOLDER / registry.study).glob("*.py")):
        import_module(f"fewbits.analysis.studies.{registry.study}.{path.stem}")
    if registry.loaded:
        return
    registry.loaded = True
    for name, made, table in declared_tables(registry.study):
        registry.add_table(name, table, made)
    for name, title, figure in declared_figures(registry.study):
        registry.add_figure(name, figure, title)


def table(study: str, name: str, title: str | None = None) -> Callable[[MakeTable], MakeTable]:
    """Register the decorated function as a table of the paper or, with a title, of our own."""

    def register(make: MakeTable) -> MakeTable:
        _registry(study).add_table(name, make, title)
        return make

    return register


def figure(study: str, name: str, title: str | None = None) -> Callable[[MakeFigure], MakeFigure]:
    """Register the decorated function as a figure of the paper or, with a title, of our own."""

    def register(make: MakeFigure) -> MakeFigure:
        _registry(study).add_figure(name, make, title)
        return make

    return register


def _registry(study: str) -> StudyRegistry:
    one_of("study", study, STUDIES)
    return _REGISTRIES.setdefault(study, StudyRegistry(study))
