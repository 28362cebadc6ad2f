"""Verdicts at several scales, side by side: a cell for each claim and scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fewbits.analysis.engine.claims import Claim
from fewbits.analysis.engine.findings import Verdict
from fewbits.analysis.views.claims import FindingView, badge, view
from fewbits.analysis.views.html import render


@dataclass(frozen=True)
class Column:
    """The verdicts of one scale; `link` is the report that has them in full."""

    name: str
    remark: str
    verdicts: Mapping[str, Verdict]
    link: str = ""


@dataclass(frozen=True)
class Cell:
    badge: Markup
    finding: FindingView | None
    link: str


def scales_table(claims: Sequence[Claim], columns: Sequence[Column]) -> Markup:
    """Return the table of these claims."""
    rows = [(claim, [_cell(claim, column) for column in columns]) for claim in claims]
    return render("scales", columns=[(column.name, column.remark) for column in columns], rows=rows)


def _cell(claim: Claim, column: Column) -> Cell | None:
    verdict = column.verdicts.get(claim.id)
    if verdict is None:
        return None
    leading = verdict.leading
    link = f"{column.link}#{claim.id}" if column.link else ""
    return Cell(badge(verdict.outcome), view(leading) if leading else None, link)
