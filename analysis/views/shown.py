"""Tables, claims and figures in notebooks: DataFrames and matplotlib Figures that Jupyter shows with the report's HTML.

Results of pandas operations on such a frame, for example `frame.query(…)`, are ordinary DataFrames. Jupyter draws the
current state of a figure, so changes that a user has made are visible. In the run that makes a report, each output also
has the item's HTML and files for the report, under the MIME type PRIVATE.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from fewbits.analysis.engine.claims.findings import Finding, Verdict
from fewbits.analysis.figures.panels import panels, placeholder
from fewbits.analysis.figures.theme import draw_figure, in_both_themes, png, svg
from fewbits.analysis.report.items import FigureResult
from fewbits.analysis.views.html import anchor, in_notebook, private

Files = Mapping[str, str | bytes]  # contents by path in the report's folder


class ShownFrame(pd.DataFrame):
    """A DataFrame that Jupyter displays with the HTML of the report."""

    # pandas warns about attributes that are neither columns nor listed here
    _metadata = ("report_name", "report_html", "report_files")
    report_name: str  # for example `Table 2`
    report_html: Markup
    report_files: Files

    @property
    def _constructor(self) -> Callable[..., pd.DataFrame]:
        return pd.DataFrame

    @property
    def empty_item(self) -> bool:
        return self.empty

    def _repr_html_(self) -> str:
        return in_notebook(self.report_html)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        # The repr of a DataFrame depends on the width of the terminal, so the notebook has the table's name instead.
        bundle = {"text/plain": f"<{self.report_name}>", "text/html": self._repr_html_()}
        return bundle | private(self.report_html, self.report_files)


def shown_frame(
    rows: pd.DataFrame | Iterable[Mapping[str, Any]], name: str, html: Markup, files: Files | None = None
) -> ShownFrame:
    """Return a DataFrame with these rows that Jupyter displays as this HTML. name: of the item, such as `Table 2`."""
    frame = ShownFrame(rows if isinstance(rows, pd.DataFrame) else list(rows))
    frame.report_name, frame.report_html, frame.report_files = name, html, files or {}
    return frame


class ShownFigure(Figure):
    """A matplotlib Figure that Jupyter displays with the report's caption and notes."""

    report_name: str  # for example `Figure 5`
    missing: str  # why the figure is empty; "" if it is not empty
    _card: Callable[[str], Markup]  # see `shown_figure`

    @property
    def empty_item(self) -> bool:
        return bool(self.missing)

    @property
    def report_html(self) -> Markup:
        """The figure with its caption and notes as HTML for the report, in the light and the dark theme."""
        return self._card("" if self.missing else data_uri(in_both_themes(svg(self))))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        vector, image, html = svg(self), png(self), self._card("")
        files: dict[str, str | bytes] = {}
        if not self.missing:
            stem = f"figures/{anchor(self.report_name)}"
            html, files = self._card(data_uri(vector)), {f"{stem}.svg": vector, f"{stem}.png": image}
        bundle = {"text/plain": f"<{self.report_name}>", "text/html": in_notebook(html)}
        bundle["image/png"] = base64.b64encode(image).decode()
        return bundle | private(self._card(data_uri(in_both_themes(vector))) if files else html, files)


def shown_figure(
    result: FigureResult | None, name: str, card: Callable[[str], Markup], missing: str = ""
) -> ShownFigure:
    """Return a figure for notebooks, or an empty one with the reason. card: address of the image → HTML."""
    figure = draw_figure(result or FigureResult(lambda: _empty(missing)))
    # Change the class of the existing Figure, because matplotlib cannot move its content to a new ShownFigure.
    figure.__class__ = ShownFigure
    assert isinstance(figure, ShownFigure)
    figure.missing, figure.report_name, figure._card = missing, name, card
    return figure


def _empty(reason: str) -> Figure:
    figure, [[axes]] = panels(1, 1, 1.2)
    placeholder(axes, reason)
    return figure


def data_uri(vector: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(vector.encode()).decode()


class Items(tuple[ShownFrame | ShownFigure, ...]):
    """Items that Jupyter displays one below the other."""

    @property
    def report_html(self) -> Markup:
        return Markup().join(item.report_html for item in self)

    def _ipython_display_(self) -> None:
        from IPython.display import display  # this method is only called in IPython

        if self:
            display(*self)

    def __repr__(self) -> str:
        return f"({', '.join(item.report_name for item in self)})"


def numbers_of(finding: Finding) -> dict[str, Any]:
    """Return the numbers of a comparison by column: low and high are the interval, and paper is the paper's effect."""
    low, high = (finding.interval.low, finding.interval.high) if finding.interval else (None, None)
    numbers = {"effect": finding.effect, "low": low, "high": high, "relative": finding.relative, "n": finding.n}
    return {**numbers, "extra_tokens": finding.extra_tokens, "paper": finding.printed}


def finding_row(verdict: Verdict, finding: Finding) -> dict[str, Any]:
    """Return the row of one comparison: its claim and verdict, its name and status, and its numbers."""
    return {
        "claim": verdict.claim.id,
        "statement": verdict.claim.statement,
        "kind": str(verdict.kind),
        "verdict": str(verdict.outcome),
        "comparison": finding.heading,
        "shows": str(finding.status),
        **numbers_of(finding),
        "margin": finding.margin,
        "p": finding.p,
        "reason": finding.reason,
    }
