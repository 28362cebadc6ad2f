"""Tables and claims in notebooks: DataFrames that Jupyter displays with the HTML of the report.

The display shows the paper's numbers beside ours, captions, notes and the trials behind each number. Results of pandas
operations on such a frame, for example `frame.query(…)`, are ordinary DataFrames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Union

import pandas as pd
from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Finding, Outcome, Verdict
from fewbits.analysis.views.html import in_notebook

if TYPE_CHECKING:
    from fewbits.analysis.views.shown_figure import ShownFigure

# The columns with the numbers of a comparison: fields of Finding; low and high are the interval, p is p_for.
NUMBERS = ("effect", "low", "high", "relative", "n", "extra_tokens", "margin", "p")


class ShownFrame(pd.DataFrame):
    """A DataFrame that Jupyter displays with the HTML of the report."""

    _metadata = ("_name", "_html")  # pandas warns about attributes that are neither columns nor listed here
    _name: str
    _html: Markup

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

    def _repr_html_(self) -> str:
        return in_notebook(self._html)


def shown_frame(rows: pd.DataFrame | Iterable[Mapping[str, Any]], name: str, html: Markup) -> ShownFrame:
    """Return a DataFrame with these rows that Jupyter displays as this HTML.

    name: the name of the table or claim in the report, for example `Table 2`.
    """
    frame = ShownFrame(rows if isinstance(rows, pd.DataFrame) else list(rows))
    frame._name, frame._html = name, html
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

        display(*self)

    def __repr__(self) -> str:
        return f"({', '.join(item.report_name for item in self)})"


# -------------------------------------------------------------------------------- the rows of frames


def outcome_rows(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Return a row {"verdict": …, "claims": number of claims} for each possible verdict of a claim, also with 0 claims.

    verdicts: one for each claim.
    """
    outcomes = [verdict.outcome for verdict in verdicts]
    return [{"verdict": str(outcome), "claims": outcomes.count(outcome)} for outcome in Outcome]


def verdict_row(verdict: Verdict) -> dict[str, Any]:
    """Return the row of a claim: its id, statement, verdict and so on, and the numbers of one comparison.

    The comparison is `verdict.leading`, and its numbers are in the columns NUMBERS. If `verdict.leading` is None, these
    columns contain None.
    """
    return {
        "claim": verdict.claim.id,
        "statement": verdict.claim.statement,
        "ours": verdict.claim.ours,
        "kind": str(verdict.kind),
        "verdict": str(verdict.outcome),
        "reason": verdict.reason,
        **_numbers(verdict.leading),
    }


def finding_row(verdict: Verdict, finding: Finding) -> dict[str, Any]:
    """Return the row of one comparison: the claim's id and verdict, the comparison's name and status, and its numbers.

    NUMBERS lists the columns of the numbers.
    """
    return {
        "claim": verdict.claim.id,
        "verdict": str(verdict.outcome),
        "comparison": finding.heading,
        "shows": str(finding.status),
        **_numbers(finding),
    }


def _numbers(finding: Finding | None) -> dict[str, Any]:
    if finding is None:
        return dict.fromkeys(NUMBERS)
    low, high = (finding.interval.low, finding.interval.high) if finding.interval else (None, None)
    values = (
        finding.effect,
        low,
        high,
        finding.relative,
        finding.n,
        finding.extra_tokens,
        finding.margin,
        finding.p_for,
    )
    return dict(zip(NUMBERS, values, strict=True))
