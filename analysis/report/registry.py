"""The tables and figures of each study: functions of its modules, and data in its tables.yaml and figures.yaml.

Modules mark functions of Results with `@table("mor", "Table 2")` or `@figure("mor", "Figure 5")`. Titles of the paper's
tables and figures come from `studies/STUDY/paper.yaml`. Those of our own are registered with a title; reports show them
after the paper's and mark them as ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Generic, TypeVar

import yaml

from fewbits.analysis.engine.results.paper import STUDIES as FOLDER
from fewbits.analysis.engine.results.paper import HasId, paper
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


@dataclass(frozen=True)
class StudyRegistry:
    """The tables and figures of one study, by id."""

    tables: dict[str, Entry[MakeTable]] = field(default_factory=dict)
    figures: dict[str, Entry[MakeFigure]] = field(default_factory=dict)


_REGISTERED: dict[str, StudyRegistry] = defaultdict(StudyRegistry)  # by study, in the order of registration


@cache
def study_registry(study: str) -> StudyRegistry:
    """Return all tables and figures of a study: the paper's in its order, then our own in the order of registration.

    They are those of the study's modules, then those of its YAML files.
    """
    one_of("study", study, STUDIES)
    for path in sorted((FOLDER / study).glob("*.py")):
        if path.stem != "notebook":
            import_module(f"fewbits.analysis.studies.{study}.{path.stem}")
    of = declared(study)
    for arms in of.arms:
        table(study, arms.id, arms.title)(partial(arms_table, study=study, of=arms))
    for training in of.training:
        figure(study, training.id, training.title)(partial(training_figure, study=study, of=training))
    for scores in of.scores:
        figure(study, scores.id)(partial(scores_figure, study=study, of=scores))
    for effects in of.effects:
        figure(study, effects.id, effects.title)(partial(effects_picture, study=study, of=effects))
    if of.probes:
        title = "Which operands change the gradient and the loss"
        figure(study, of.probes.id, title)(partial(probes_figure, study=study, of=of.probes))
    made, printed = _REGISTERED[study], paper(study)
    return StudyRegistry(_in_order(made.tables, printed.tables), _in_order(made.figures, printed.figures))


def _in_order(made: dict[str, Entry[M]], printed: Sequence[HasId]) -> dict[str, Entry[M]]:
    ids = [*(one.id for one in printed if one.id in made), *made]
    return {name: made[name] for name in dict.fromkeys(ids)}


def table(study: str, name: str, title: str | None = None) -> Callable[[MakeTable], MakeTable]:
    """Register the decorated function as the table with the id `name`. title: only for a table of our own."""
    return partial(_register, _REGISTERED[study].tables, name, title or paper(study).table(name).title, not title)


def figure(study: str, name: str, title: str | None = None) -> Callable[[MakeFigure], MakeFigure]:
    """Register the decorated function as the figure with the id `name`. title: only for a figure of our own."""
    return partial(_register, _REGISTERED[study].figures, name, title or paper(study).figure(name).title, not title)


def _register(entries: dict[str, Entry[M]], name: str, title: str, of_paper: bool, make: M) -> M:
    if name in entries:
        raise ValueError(f"{name} is registered twice; its id must be unique")
    entries[name] = Entry(name, title, of_paper, make)
    return make
