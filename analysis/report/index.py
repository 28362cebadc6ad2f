"""Write the page of all studies: a table for each study, with a row for each claim and a column for each scale.

The table shows a scale if the folder of reports has a report of it. The verdicts are read from each report's
verdicts.json, so the page agrees with the reports. The texts of the claims are read from the installed
`analysis/studies/STUDY/claims.yaml`, not from the reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fewbits.analysis.engine.claims.findings import Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import Claim, load_claims, studies_with_claims
from fewbits.analysis.report.files import INDEX
from fewbits.analysis.report.page import document
from fewbits.analysis.views.claims import FindingView, badge, tally, view
from fewbits.analysis.views.html import render
from fewbits.common.atomic import write_atomically
from fewbits.common.from_dict import from_dict
from fewbits.sweeps.planning.studies import STUDIES

TITLE = "Pre-training in few bits: what was reproduced"
ABOUT = (
    "Our verdict on each claim of each paper. A verdict is valid for its scale; it may differ at another scale. The "
    "reports have the reasons, tables, figures and trials."
)


@dataclass(frozen=True)
class Report:
    """A report in the folder of reports, as its verdicts.json describes it."""

    study: str
    scale: str
    size: str  # the amount of training as text (`StudyReport.size`)
    folder: str  # the name of its folder
    flags: int  # the number of its warnings
    verdicts: Mapping[str, Verdict]  # by claim

    @property
    def link(self) -> str:
        return f"{self.folder}/{INDEX}"

    @property
    def tally(self) -> Markup:
        return tally(self.verdicts.values())


def write_index(reports: Path) -> Path:
    """Write `index.html` for all reports in a folder, and return its path; raise ValueError if there is no report."""
    found_reports = [report for path in sorted(reports.glob(f"*/{INDEX}")) if (report := _read(path)) is not None]
    if not found_reports:
        raise ValueError(f"no report in {reports}; to write one: fewbits report study=NAME scale=NAME")
    index = reports / INDEX
    write_atomically(index, _page(found_reports).encode())
    return index


def _read(page: Path) -> Report | None:
    """Return the report with this index.html; None if the page is no report."""
    file = page.with_name("verdicts.json")
    try:
        record = json.loads(file.read_text("utf-8"))
        if "claims" not in record:
            return None
        verdicts = {name: restored(claim) for name, claim in record["claims"].items()}
        flags = sum(len(record[key]) for key in ("notices", "flags", "mixed"))
        return Report(record["study"], record["scale"], record["size"], page.parent.name, flags, verdicts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); write this report again, or remove its folder") from None


def restored(record: Mapping[str, Any]) -> Verdict:
    """Return the Verdict that a claim's record in verdicts.json describes."""
    verdict = from_dict(Verdict, record)
    controls = (replace(control, findings=_restored(control.findings)) for control in verdict.controls)
    findings = _restored(verdict.findings)
    return replace(verdict, outcome=Outcome(verdict.outcome), findings=findings, controls=tuple(controls))


def _restored(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    return tuple(replace(finding, status=Status(finding.status)) for finding in findings)


def _page(reports: list[Report]) -> str:
    names = [study for study in STUDIES if any(report.study == study for report in reports)]
    sections = []
    for name in names:
        own = [report for report in reports if report.study == name]
        columns = [Column(report.scale, report.size.partition(";")[0], report.verdicts, report.link) for report in own]
        study = STUDIES[name]
        sections.append(
            {
                "title": study.title,
                "arxiv": study.arxiv,
                "about": study.about,
                "reports": own,
                "table": scales_table(_claims(name), columns),
            }
        )
    header = render("header", kicker="fewbits", title=TITLE, arxiv="", about=ABOUT, tally="")
    body = render("index", header=header, studies=sections)
    return document(TITLE, body, [STUDIES[name].title for name in names], ABOUT)


def _claims(study: str) -> tuple[Claim, ...]:
    return load_claims(study).claims if study in studies_with_claims() else ()


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
