"""Figures as data: `studies/STUDY/figures.yaml` declares those that need no code of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import yaml

from fewbits.analysis.engine.arms import STUDIES
from fewbits.analysis.figures.effects import EffectsFigure, effects_picture
from fewbits.analysis.figures.ood import OodFigure, ood_figure
from fewbits.analysis.figures.training import TrainingFigure, training_figure
from fewbits.analysis.report.items import MakeFigure
from fewbits.common.from_dict import from_dict

FILE = "figures.yaml"


@dataclass(frozen=True)
class DeclaredFigures:
    training: tuple[TrainingFigure, ...] = ()
    ood: tuple[OodFigure, ...] = ()
    effects: EffectsFigure | None = None


@cache
def declared(study: str) -> DeclaredFigures:
    """Return what a study's file declares; nothing where it has none."""
    path = STUDIES / study / FILE
    return read_declared(path) if path.is_file() else DeclaredFigures()


def read_declared(path: Path) -> DeclaredFigures:
    """Read a file of figures."""
    try:
        return from_dict(DeclaredFigures, yaml.safe_load(path.read_text("utf-8")))
    except ValueError as error:
        raise ValueError(f"{path.parent.name}/{path.name}: {error}") from None


def declared_figures(study: str) -> Iterator[tuple[str, str | None, MakeFigure]]:
    """Yield the id, the title where the figure is not the paper's, and the function that makes it."""
    found = declared(study)
    for training in found.training:
        yield training.id, None, partial(training_figure, study=study, of=training)
    for ood in found.ood:
        yield ood.id, None, partial(ood_figure, study=study, of=ood)
    if found.effects is not None:
        yield found.effects.id, found.effects.title, partial(effects_picture, study=study, of=found.effects)
