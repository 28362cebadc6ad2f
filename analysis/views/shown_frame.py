"""Tables and claims in notebooks: DataFrames that Jupyter displays with the HTML of the report.

Results of pandas operations on such a frame, for example `frame.query(…)`, are ordinary DataFrames. In the run that
makes a report, each output also has the item's HTML and files for the report, under the MIME type PRIVATE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Union

import pandas as pd
from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Finding, Verdict
from fewbits.analysis.views.html import in_notebook, private

if TYPE_CHECKING:
    from fewbits.analysis.views.shown_figure import ShownFigure

# The columns with the numbers of a comparison: fields of Finding; low and high are the interval, paper is `printed`.
NUMBERS = ("effect", "low", "high", "relative", "n", "extra_tokens", "paper", "margin", "p")


class ShownFrame(pd.DataFrame):
    """A DataFrame that Jupyter displays with the HTML of the report."""

    _metadata = ("_name", "_html", "_files")  # pandas warns about attributes that are neither columns nor listed here
    _name: str
    _html: Markup
    _files: Mapping[str, str | bytes]

    @property
    def _constructor(self) -> Callable[..., pd.DataFrame]:
        return pd.DataFrame

    @property
    def report_name(self) -> str:
        """The name of the item in the report, for example `Table 2`."""
        return self._name

    @property
    def report_html(self) -> Markup:
        """The item as HTML for the report's page."""
        return self._html

    @property
    def empty_item(self) -> bool:
        """True if the item has no data."""
        return self.empty

    def _repr_html_(self) -> str:
        return in_notebook(self._html)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        # The repr of a DataFrame depends on the width of the terminal, so the notebook has the table's name instead.
        bundle = {"text/plain": f"<{self._name}>", "text/html": self._repr_html_()}
        return bundle | private(self._html, self._files)


def shown_frame(
    rows: pd.DataFrame | Iterable[Mapping[str, Any]],
    name: str,
    html: Markup,
    files: Mapping[str, str | bytes] | None = None,
) -> ShownFrame:
    """Return a DataFrame with these rows that Jupyter displays as this HTML.

    name: the name of the table or claim in the report, for example `Table 2`. files: the item's files in the report.
    """
    frame = ShownFrame(rows if isinstance(rows, pd.DataFrame) else list(rows))
    frame._name, frame._html, frame._files = name, html, files or {}
    return frame


class Items(tuple[Union[ShownFrame, "ShownFigure"], ...]):
    """A tuple of tables, figures and claims, which Jupyter displays one below the other."""

    __slots__ = ()

    @property
    def report_html(self) -> Markup:
        """The items as HTML for the report's page, in order."""
        return Markup().join(item.report_html for item in self)

    def _ipython_display_(self) -> None:
        from IPython.display import display  # this method is only called in IPython

        if self:
            display(*self)

    def __repr__(self) -> str:
        return f"({', '.join(item.report_name for item in self)})"


def finding_row(verdict: Verdict, finding: Finding) -> dict[str, Any]:
    """Return the row of one comparison: the claim's id and verdict, the comparison's name and status, and its numbers.

    NUMBERS lists the columns of the numbers.
    """
    low, high = (finding.interval.low, finding.interval.high) if finding.interval else (None, None)
    values = (finding.effect, low, high, finding.relative, finding.n, finding.extra_tokens, finding.printed)
    return {
        "claim": verdict.claim.id,
        "statement": verdict.claim.statement,
        "kind": str(verdict.kind),
        "verdict": str(verdict.outcome),
        "comparison": finding.heading,
        "shows": str(finding.status),
        **dict(zip(NUMBERS, (*values, finding.margin, finding.p), strict=True)),
        "reason": finding.reason,
    }
