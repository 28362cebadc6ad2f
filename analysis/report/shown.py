"""Items as a notebook shows them: a table, a figure or claims, as HTML with the data behind it."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from fewbits.analysis.engine.findings import Verdict
from fewbits.analysis.report.items import FigureResult, Picture, Table, TableResult, why_missing
from fewbits.analysis.views.html import Html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PIXELS = 120  # of an inch of a figure, where there is room


@dataclass(frozen=True, repr=False)
class TableItem(Html):
    """A table: `frame` has its numbers, `result` these with their trials."""

    result: Table | None = None

    @property
    def frame(self) -> pd.DataFrame:
        """A row per metric; per column the paper's number, ours, difference, interval and seeds."""
        return self.result.frame() if isinstance(self.result, TableResult) else pd.DataFrame()


@dataclass(frozen=True)
class Drawing:
    """A figure as files."""

    light: str  # SVG
    dark: str
    png: bytes  # light
    width: float  # inches

    @property
    def pixels(self) -> int:
        return round(self.width * PIXELS)

    @property
    def light_uri(self) -> str:
        return _data_uri(self.light)

    @property
    def dark_uri(self) -> str:
        return _data_uri(self.dark)


@dataclass(frozen=True, repr=False)
class FigureItem(Html):
    """A figure: `figure` is matplotlib's, `drawing` the report's files."""

    result: Picture | None = None
    drawing: Drawing | None = None

    @property
    def figure(self) -> Figure:
        """The figure in the light theme, drawn anew."""
        from fewbits.analysis.figures.theme import themed  # matplotlib takes its time

        if not isinstance(self.result, FigureResult):
            raise ValueError(f"{self.name} has no data: {'' if self.result is None else why_missing(self.result)}")
        return themed(self.result, "light")


@dataclass(frozen=True, repr=False)
class ClaimsItem(Html):
    """Claims with their verdicts; `frame` has a row for each comparison."""

    verdicts: tuple[Verdict, ...] = ()

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each comparison: claim, verdict, what it shows, effect, interval, seeds, p."""
        rows = [
            {
                "claim": verdict.claim.id,
                "verdict": str(verdict.outcome),
                "comparison": one.heading,
                "shows": str(one.status),
                "effect": one.effect,
                "low": one.interval.low if one.interval else None,
                "high": one.interval.high if one.interval else None,
                "n": one.n,
                "mde": one.mde,
                "margin": one.margin,
                "p": one.p_for,
            }
            for verdict in self.verdicts
            for one in verdict.findings
        ]
        return pd.DataFrame(rows)


def draw(result: FigureResult) -> Drawing:
    """Draw a figure in both themes."""
    from fewbits.analysis.figures.theme import png, svg, themed  # matplotlib takes its time

    light, dark = themed(result, "light"), themed(result, "dark")
    return Drawing(svg(light), svg(dark), png(light), float(light.get_figwidth()))


def _data_uri(drawing: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(drawing.encode()).decode()
