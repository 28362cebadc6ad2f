"""Compute the verdicts of claims that the user has written about a sweep, and display them as a report does."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from fewbits.analysis.engine.claims.judging import judge_claims
from fewbits.analysis.engine.claims.schema import claims_from
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.views.claims import card
from fewbits.analysis.views.shown_frame import ShownFrame, finding_row, shown_frame


def judged(file: Path, results: Results) -> ShownFrame:
    """Return a frame with a row for each comparison of the claims in a YAML file, decided by the sweep's results.

    `finding_row` documents the columns. Jupyter shows a card for each claim, with its verdict, in place of the frame.
    Raise ValueError if the file is not valid.
    """
    verdicts = judge_claims(claims_from(file, results.plan.sweeps[0].study), results)
    rows = [finding_row(verdict, finding) for verdict in verdicts.values() for finding in verdict.findings]
    cards = Markup().join(map(card, verdicts.values()))
    return shown_frame(rows, ", ".join(verdicts), cards)
