"""Figures in notebooks: matplotlib Figures that Jupyter displays with the report's caption and notes.

Jupyter draws the current state of the figure, so changes that a user has made are visible.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from fewbits.analysis.figures.panels import panels, placeholder
from fewbits.analysis.figures.theme import in_both_themes, png, svg, themed
from fewbits.analysis.report.items import FigureResult
from fewbits.analysis.views.html import ASKED, in_notebook, private
from fewbits.analysis.views.numbers import anchor

PIXELS = 120  # the width on the page in pixels per inch of the figure, if the page is wide enough


@dataclass(frozen=True)
class Drawing:
    """A figure drawn as SVG and PNG, for the report and for notebooks."""

    light: str  # SVG in the light theme
    width: float  # in inches
    dark: str = ""  # SVG in the dark theme; if empty, the page shows the light SVG in both themes
    png: bytes = b""  # PNG in the light theme

    @property
    def pixels(self) -> int:
        """The width in pixels at which an HTML page shows the figure, if the page is wide enough."""
        return round(self.width * PIXELS)

    @cached_property
    def uris(self) -> tuple[str, str]:
        """The SVGs as data URIs, (light theme, dark theme); the second is "" if the first serves both themes."""
        if self.dark and (both := in_both_themes(self.light, self.dark)):
            return _data_uri(both), ""
        return _data_uri(self.light), _data_uri(self.dark) if self.dark else ""


def draw(result: FigureResult, light: Figure | None = None) -> Drawing:
    """Return the drawing of a figure in both themes. light: the figure in the light theme, if it is already drawn."""
    light = light or themed(result, "light")
    return Drawing(svg(light), light.get_figwidth(), svg(themed(result, "dark")), png(light))


class ShownFigure(Figure):
    """A matplotlib Figure that Jupyter displays with the report's caption and notes."""

    missing: str  # why the figure is empty; "" if it is not empty
    report_name: str  # for example `Figure 5`
    _result: FigureResult | None
    _card_html: Callable[[Drawing | None], Markup]  # see `shown_figure`

    @property
    def empty_item(self) -> bool:
        """True if the figure has no data."""
        return bool(self.missing)

    @property
    def report_html(self) -> Markup:
        """The figure with its caption and notes as HTML for the report, in the light and the dark theme."""
        return self._card_html(draw(self._result, self) if self._result else None)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        drawing = Drawing(svg(self), self.get_figwidth(), png=png(self))
        html = in_notebook(self._card_html(None if self.missing else drawing))
        image = base64.b64encode(drawing.png).decode()
        bundle = {"text/plain": f"<{self.report_name}>", "text/html": html, "image/png": image}
        stem = f"figures/{anchor(self.report_name)}"
        files: dict[str, str | bytes] = (
            {} if self.missing else {f"{stem}.svg": drawing.light, f"{stem}.png": drawing.png}
        )
        return bundle | (private(self.report_html, {} if self.missing else files) if ASKED in os.environ else {})


def shown_figure(
    result: FigureResult | None, name: str, card_html: Callable[[Drawing | None], Markup], missing: str = ""
) -> ShownFigure:
    """Return a figure for notebooks; if `result` is None, an empty figure whose text is the reason `missing`.

    name: the figure's name in the report, for example `Figure 5`.
    card_html: a function that takes a drawing, or None if the figure is empty, and returns HTML with caption and notes.
    """
    figure = themed(result or FigureResult(lambda: _empty(missing)), "light")
    # Change the class of the existing Figure, because matplotlib cannot move its content to a new ShownFigure.
    figure.__class__ = ShownFigure
    assert isinstance(figure, ShownFigure)
    figure.missing, figure.report_name, figure._result, figure._card_html = missing, name, result, card_html
    return figure


def _empty(reason: str) -> Figure:
    figure, [[axes]] = panels(1, 1, 1.2)
    placeholder(axes, reason)
    return figure


def _data_uri(drawing: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(drawing.encode()).decode()
