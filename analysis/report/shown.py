"""The items that a notebook shows: a table, a figure or claims, as HTML with the data behind it."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from fewbits.analysis.engine.claims.findings import Verdict
from fewbits.analysis.report.items import FigureResult, Picture, Table, TableResult, why_missing
from fewbits.analysis.views.html import Html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PIXELS = 120  # the width on the page, per inch of the figure, if there is room


@dataclass(frozen=True, repr=False)
class TableItem(Html):
    """A table: `frame` has the numbers, `result` also the trials behind them."""

    result: Table | None = None

    @property
    def frame(self) -> pd.DataFrame:
        """The table's numbers as `TableResult.frame` returns them; empty if there is no table."""
        return self.result.frame() if isinstance(self.result, TableResult) else pd.DataFrame()


@dataclass(frozen=True)
class Drawing:
    """A drawn figure as the contents of files."""

    light: str  # SVG in the light theme
    dark: str  # SVG in the dark theme
    png: bytes  # in the light theme
    width: float  # in inches

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
    """A figure: `figure` is a figure of matplotlib, `drawing` has the contents of the report's files."""

    result: Picture | None = None
    drawing: Drawing | None = None

    @property
    def figure(self) -> Figure:
        """The figure of matplotlib in the light theme; each access draws a new one."""
        from fewbits.analysis.figures.theme import themed  # imported here because matplotlib is slow to import

        if not isinstance(self.result, FigureResult):
            raise ValueError(f"{self.name} has no data: {'' if self.result is None else why_missing(self.result)}")
        return themed(self.result, "light")


@dataclass(frozen=True, repr=False)
class ClaimsItem(Html):
    """Claims with their verdicts; `frame` has a row for each comparison."""

    verdicts: tuple[Verdict, ...] = ()

    @property
    def frame(self) -> pd.DataFrame:
        """A table with a row for each comparison, with its verdict, status, effect, interval, n, margin and p."""
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
    from fewbits.analysis.figures.theme import png, svg, themed  # imported here because matplotlib is slow to import

    light, dark = themed(result, "light"), themed(result, "dark")
    return Drawing(svg(light), svg(dark), png(light), float(light.get_figwidth()))


def _data_uri(drawing: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(drawing.encode()).decode()
