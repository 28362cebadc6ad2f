"""Make the tables and figures that a study declares as data, in `studies/STUDY/figures.yaml` and `tables.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import yaml

from fewbits.analysis.engine.results.paper import STUDIES
from fewbits.analysis.figures.effects import EffectsFigure, effects_picture
from fewbits.analysis.figures.probes import ProbesFigure, probes_figure
from fewbits.analysis.figures.scores import ScoresFigure, scores_figure
from fewbits.analysis.figures.training import TrainingFigure, training_figure
from fewbits.analysis.report.items import MakeFigure, MakeTable
from fewbits.analysis.report.top import Top
from fewbits.analysis.tables.arms import ArmsTable, arms_table
from fewbits.common.from_dict import from_dict

FILES = ("figures.yaml", "tables.yaml")


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
    for path in (STUDIES / study / name for name in FILES):
        if path.is_file():
            found |= yaml.safe_load(path.read_text("utf-8"))
    try:
        return from_dict(Declared, found)
    except ValueError as error:
        raise ValueError(f"{study}/{' or '.join(FILES)}: {error}") from None


def declared_figures(study: str) -> Iterator[tuple[str, str | None, MakeFigure]]:
    """Yield the id, the title and the drawing function of each figure that the study declares.

    The title is None for a figure of the paper, whose title is in `analysis/studies/STUDY/paper.yaml`.
    """
    found = declared(study)
    for training in found.training:
        yield training.id, training.title, partial(training_figure, study=study, of=training)
    for scores in found.scores:
        yield scores.id, None, partial(scores_figure, study=study, of=scores)
    for effects in found.effects:
        yield effects.id, effects.title, partial(effects_picture, study=study, of=effects)
    if found.probes is not None:
        yield found.probes.id, found.probes.title, partial(probes_figure, study=study, of=found.probes)


def declared_tables(study: str) -> Iterator[tuple[str, str, MakeTable]]:
    """Yield the id, the title and the making function of each table that the study declares; none is the paper's."""
    found = declared(study)
    for one in found.arms:
        yield one.id, one.title, partial(arms_table, study=study, of=one)
