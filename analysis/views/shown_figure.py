"""Figures as a notebook shows them: matplotlib Figures that are displayed with the report's caption and notes.

The display is drawn from the figure itself, so it shows what a user has changed in it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from markupsafe import Markup
from matplotlib.figure import Figure

from fewbits.analysis.figures.panels import panels, placeholder
from fewbits.analysis.figures.theme import in_both_themes, png, svg, themed
from fewbits.analysis.report.items import FigureResult
from fewbits.analysis.views.html import in_notebook

PIXELS = 120  # the width on the page, per inch of the figure, if there is room


@dataclass(frozen=True)
class Drawing:
    """A drawn figure as the contents of files."""

    light: str  # SVG in the light theme
    width: float  # in inches
    dark: str = ""  # SVG in the dark theme; empty: the page shows the light one in both
    png: bytes = b""  # in the light theme

    @property
    def pixels(self) -> int:
        return round(self.width * PIXELS)

    @cached_property
    def uris(self) -> tuple[str, str]:
        """The pictures of the page: one for both themes, or the light and the dark one; the second may be empty."""
        if self.dark and (both := in_both_themes(self.light, self.dark)):
            return _data_uri(both), ""
        return _data_uri(self.light), _data_uri(self.dark) if self.dark else ""


def draw(result: FigureResult, light: Figure | None = None) -> Drawing:
    """Draw a figure in both themes. light: the figure in the light theme, if it has been drawn already."""
    light = light or themed(result, "light")
    return Drawing(svg(light), light.get_figwidth(), svg(themed(result, "dark")), png(light))


class ShownFigure(Figure):
    """A figure that notebooks show with a caption and notes; `missing` says why it is empty."""

    missing: str
    report_name: str
    _card: Callable[[Drawing | None], Markup]
    _drawing: Callable[[Figure], Drawing]

    @property
    def report_html(self) -> Markup:
        """The HTML of the report's page, with the figure in both themes."""
        return self._card(None if self.missing else self._drawing(self))

    def report_bundle(self) -> dict[str, str]:
        """Return the output of the report's notebook, which has the drawing of the report's page."""
        return self._repr_mimebundle_() if self.missing else self._bundle(self._drawing(self))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self._bundle(Drawing(svg(self), self.get_figwidth(), png=png(self)))

    def _bundle(self, drawing: Drawing) -> dict[str, str]:
        html = in_notebook(self._card(None if self.missing else replace(drawing, dark="")))
        image = base64.b64encode(drawing.png).decode()
        return {"text/plain": f"<{self.report_name}>", "text/html": html, "image/png": image}


def shown_figure(
    result: FigureResult | None,
    name: str,
    card: Callable[[Drawing | None], Markup],
    drawing: Callable[[Figure], Drawing],
    missing: str = "",
) -> ShownFigure:
    """Return the figure of a result; without a result, a figure that says why it is missing.

    card: returns the HTML of a drawing with its caption. drawing: returns the drawing of the report's page for the
    figure in the light theme.
    """
    figure = themed(result or FigureResult(lambda: _empty(missing)), "light")
    figure.__class__ = ShownFigure  # any function may have drawn it, and matplotlib cannot move artists to a copy
    assert isinstance(figure, ShownFigure)
    figure.missing, figure.report_name, figure._card, figure._drawing = missing, name, card, drawing
    return figure


def _empty(reason: str) -> Figure:
    figure, [[axes]] = panels(1, 1, 1.2)
    placeholder(axes, reason)
    return figure


def _data_uri(drawing: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(drawing.encode()).decode()
