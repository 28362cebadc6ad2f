"""Figures in notebooks: matplotlib Figures that Jupyter displays with the report's caption and notes.

Jupyter draws the current state of the figure, so changes that a user has made are visible.
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
    _card_html: Callable[[Drawing | None], Markup]  # see `shown_figure`
    _draw_for_report: Callable[[Figure], Drawing]  # see `shown_figure`

    @property
    def report_html(self) -> Markup:
        """The figure with its caption and notes as HTML for the report, in the light and the dark theme."""
        return self._card_html(None if self.missing else self._draw_for_report(self))

    def report_bundle(self) -> dict[str, str]:
        """Return the figure as {MIME type: data}, to be stored in the executed notebook beside the report.

        The notebook shows the same drawing as the report, but only in the light theme.
        """
        return self._repr_mimebundle_() if self.missing else self._bundle(self._draw_for_report(self))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self._bundle(Drawing(svg(self), self.get_figwidth(), png=png(self)))

    def _bundle(self, drawing: Drawing) -> dict[str, str]:
        html = in_notebook(self._card_html(None if self.missing else replace(drawing, dark="")))
        image = base64.b64encode(drawing.png).decode()
        return {"text/plain": f"<{self.report_name}>", "text/html": html, "image/png": image}


def shown_figure(
    result: FigureResult | None,
    name: str,
    card_html: Callable[[Drawing | None], Markup],
    draw_for_report: Callable[[Figure], Drawing],
    missing: str = "",
) -> ShownFigure:
    """Return a figure for notebooks; if `result` is None, an empty figure whose text is the reason `missing`.

    name: the figure's name in the report, for example `Figure 5`.
    card_html: a function that takes a drawing, or None if the figure is empty, and returns HTML with caption and notes.
    draw_for_report: a function that takes the figure in the light theme and returns the drawing for the report.
    """
    figure = themed(result or FigureResult(lambda: _empty(missing)), "light")
    # Change the class of the existing Figure, because matplotlib cannot move its content to a new ShownFigure.
    figure.__class__ = ShownFigure
    assert isinstance(figure, ShownFigure)
    figure.missing, figure.report_name, figure._card_html, figure._draw_for_report = (
        missing,
        name,
        card_html,
        draw_for_report,
    )
    return figure


def _empty(reason: str) -> Figure:
    figure, [[axes]] = panels(1, 1, 1.2)
    placeholder(axes, reason)
    return figure


def _data_uri(drawing: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(drawing.encode()).decode()
