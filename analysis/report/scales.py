"""Make the HTML table of verdicts at several scales, with a row for each claim and a column for each scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Verdict
from fewbits.analysis.engine.claims.schema import Claim
from fewbits.analysis.views.claims import FindingView, badge, view
from fewbits.analysis.views.html import render


@dataclass(frozen=True)
class Column:
    """A column of the table: the verdicts at one scale."""

    name: str  # of the scale
    remark: str  # the text beside the name in the head of the column, such as the size of the model
    verdicts: Mapping[str, Verdict]  # by claim
    link: str = ""  # the address of the report with the full verdicts


@dataclass(frozen=True)
class Cell:
    """The verdict on a claim at one scale, as the table shows it."""

    badge: Markup  # the outcome
    finding: FindingView | None  # the finding whose effect is shown; None if no finding has an effect
    link: str  # the address of the claim in the scale's report; "" without a report


def scales_table(claims: Sequence[Claim], columns: Sequence[Column]) -> Markup:
    """Return the table as HTML. A cell without a verdict on the claim has a dash."""
    rows = [(claim, [_cell(claim, column) for column in columns]) for claim in claims]
    return render("scales", columns=[(column.name, column.remark) for column in columns], rows=rows)


def _cell(claim: Claim, column: Column) -> Cell | None:
    verdict = column.verdicts.get(claim.id)
    if verdict is None:
        return None
    leading = verdict.leading
    link = f"{column.link}#{claim.id}" if column.link else ""
    return Cell(badge(verdict.outcome), view(leading) if leading else None, link)
