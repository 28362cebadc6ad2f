"""The tables and figures of each study: functions of its modules, and data in its tables.yaml and figures.yaml.

    @table("mor", "Table 2")
    def table_2(results: Results) -> Table: …

    @figure("mor", "Figure 5")
    def figure_5(results: Results) -> Picture: …

Titles of the paper's tables and figures come from `studies/STUDY/paper.yaml`. Those of our own are registered with
a title; reports show it after the paper's and mark it as ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Generic, TypeVar

import yaml

from fewbits.analysis.engine.results.paper import STUDIES as FOLDER
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.figures.effects import EffectsFigure, effects_picture
from fewbits.analysis.figures.heat_map import ProbesFigure, probes_figure
from fewbits.analysis.figures.scores import ScoresFigure, scores_figure
from fewbits.analysis.figures.training import TrainingFigure, training_figure
from fewbits.analysis.report.items import MakeFigure, MakeTable
from fewbits.analysis.report.top import Top
from fewbits.analysis.tables.arms import ArmsTable, arms_table
from fewbits.common.from_dict import from_dict, one_of
from fewbits.sweeps.planning.studies import STUDIES

FILES = ("figures.yaml", "tables.yaml")
M = TypeVar("M", MakeTable, MakeFigure)


@dataclass(frozen=True)
class Declared:
    """The contents of a study's figures.yaml and tables.yaml; each field is a top-level key of one of these files."""

    training: tuple[TrainingFigure, ...] = ()
    scores: tuple[ScoresFigure, ...] = ()
    effects: tuple[EffectsFigure, ...] = ()
    probes: ProbesFigure | None = None
    arms: tuple[ArmsTable, ...] = ()
    top: Top | None = None


@cache
def declared(study: str) -> Declared:
    """Return the contents of a study's figures.yaml and tables.yaml; all fields are empty if it has neither file."""
    found: dict[str, object] = {}
    for path in (FOLDER / study / name for name in FILES):
        if path.is_file():
            found |= yaml.safe_load(path.read_text("utf-8"))
    try:
        return from_dict(Declared, found)
    except ValueError as error:
        raise ValueError(f"{study}/{' or '.join(FILES)}: {error}") from None


@dataclass(frozen=True)
class Entry(Generic[M]):
    """A registered table or figure of a study."""

    id: str
    title: str
    of_paper: bool  # false for a table or figure of our own
    make: M  # the function that makes it from the results


@dataclass
class StudyRegistry:
    """The tables and figures of one study: the paper's in the paper's order, then our own in the order of registration.

    The ids include tables and figures of the paper that nothing makes.
    """

    study: str
    loaded: bool = False  # whether the tables and figures of tables.yaml and figures.yaml are registered
    _tables: dict[str, Entry[MakeTable]] = field(default_factory=dict)
    _figures: dict[str, Entry[MakeFigure]] = field(default_factory=dict)

    @property
    def table_ids(self) -> list[str]:
        return list(dict.fromkeys([*(table.id for table in paper(self.study).tables), *self._tables]))

    @property
    def figure_ids(self) -> list[str]:
        return list(dict.fromkeys([*(figure.id for figure in paper(self.study).figures), *self._figures]))

    @property
    def tables(self) -> list[Entry[MakeTable]]:
        return [self._tables[name] for name in self.table_ids if name in self._tables]

    @property
    def figures(self) -> list[Entry[MakeFigure]]:
        return [self._figures[name] for name in self.figure_ids if name in self._figures]

    def add_table(self, name: str, make: MakeTable, title: str | None = None) -> None:
        """Register the function that makes the table with the id `name`. title: only for a table of our own.

        Raise ValueError if the id is already registered or, without a title, if the paper has no such table.
        """
        printed = paper(self.study).table(name).title if title is None else title
        self._add(self._tables, Entry(name, printed, title is None, make))

    def add_figure(self, name: str, make: MakeFigure, title: str | None = None) -> None:
        """Register the function that makes the figure with the id `name`, as `add_table` does."""
        printed = paper(self.study).figure(name).title if title is None else title
        self._add(self._figures, Entry(name, printed, title is None, make))

    def _add(self, entries: dict[str, Entry[M]], entry: Entry[M]) -> None:
        if entry.id in entries:
            raise ValueError(f"{self.study}: {entry.id} is registered twice; its id must be unique")
        entries[entry.id] = entry

    def add_declared(self, of: Declared) -> None:
        """Register what tables.yaml and figures.yaml declare; a figure without a title is the paper's."""
        for arms in of.arms:
            self.add_table(arms.id, partial(arms_table, study=self.study, of=arms), arms.title)
        for training in of.training:
            self.add_figure(training.id, partial(training_figure, study=self.study, of=training), training.title)
        for scores in of.scores:
            self.add_figure(scores.id, partial(scores_figure, study=self.study, of=scores))
        for effects in of.effects:
            self.add_figure(effects.id, partial(effects_picture, study=self.study, of=effects), effects.title)
        for probes in filter(None, [of.probes]):
            self.add_figure(probes.id, partial(probes_figure, study=self.study, of=probes), probes.title)


@cache
def _registry(study: str) -> StudyRegistry:
    one_of("study", study, STUDIES)
    return StudyRegistry(study)


def study_registry(study: str) -> StudyRegistry:
    """Return the registry of a study with all its tables and figures: those of its modules and of its YAML files."""
    registry = _registry(study)
    for path in sorted((FOLDER / study).glob("*.py")):
        if path.stem != "notebook":
            import_module(f"fewbits.analysis.studies.{study}.{path.stem}")
    if not registry.loaded:
        registry.loaded = True
        registry.add_declared(declared(study))
    return registry


def table(study: str, name: str, title: str | None = None) -> Callable[[MakeTable], MakeTable]:
    """Register the decorated function as the table with the id `name`. title: only for a table of our own."""
    return partial(_registered, _registry(study).add_table, name, title)


def figure(study: str, name: str, title: str | None = None) -> Callable[[MakeFigure], MakeFigure]:
    """Register the decorated function as the figure with the id `name`. title: only for a figure of our own."""
    return partial(_registered, _registry(study).add_figure, name, title)


def _registered(add: Callable[[str, M, str | None], None], name: str, title: str | None, make: M) -> M:
    add(name, make, title)
    return make
