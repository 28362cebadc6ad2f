"""The page of all papers: what each report in a folder says of its claims, scales side by side.

Made of the reports' verdicts.json alone, so that it says what they say, and of the claims' data today.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fewbits.analysis.engine.claims import Claim, load_claims, studies_with_claims
from fewbits.analysis.engine.findings import Finding, Outcome, Status, Verdict
from fewbits.analysis.report.files import INDEX
from fewbits.analysis.report.page import document
from fewbits.analysis.report.scales import Column, scales_table
from fewbits.analysis.views.claims import tally
from fewbits.analysis.views.html import render, style
from fewbits.common.atomic import write_atomically
from fewbits.common.from_dict import from_dict
from fewbits.sweeps.planning.studies import STUDIES

TITLE = "Pre-training in few bits: what was reproduced"
ABOUT = (
    "Each claim of each paper, as far as our runs decide it. A verdict holds at the scale that it was reached at; what "
    "holds at one need not hold at the next. The reports have the reasons, tables, figures and trials."
)


@dataclass(frozen=True)
class Report:
    """A report in the folder."""

    study: str
    scale: str
    size: str
    folder: str
    flags: int
    verdicts: Mapping[str, Verdict]

    @property
    def link(self) -> str:
        return f"{self.folder}/{INDEX}"

    @property
    def tally(self) -> Markup:
        return tally(self.verdicts.values())


def write_index(reports: Path) -> Path:
    """Write the page of all reports in a folder."""
    found = [report for path in sorted(reports.glob(f"*/{INDEX}")) if (report := _read(path)) is not None]
    if not found:
        raise ValueError(f"no report in {reports}; `fewbits report` writes one")
    index = reports / INDEX
    write_atomically(index, _page(found).encode())
    return index


def _read(page: Path) -> Report | None:
    """Return the report of a page; None for pages of several scales."""
    file = page.with_name("verdicts.json")
    try:
        record = json.loads(file.read_text("utf-8"))
        if "claims" not in record:
            return None
        verdicts = {name: restored(claim) for name, claim in record["claims"].items()}
        flags = sum(len(record[key]) for key in ("notices", "flags", "mixed"))
        return Report(record["study"], record["scale"], record["size"], page.parent.name, flags, verdicts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); write that report again, or remove it") from None


def restored(record: Mapping[str, Any]) -> Verdict:
    """Return a verdict from its record in verdicts.json."""
    verdict = from_dict(Verdict, record)
    controls = (replace(control, findings=_restored(control.findings)) for control in verdict.controls)
    findings = _restored(verdict.findings)
    return replace(verdict, outcome=Outcome(verdict.outcome), findings=findings, controls=tuple(controls))


def _restored(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    return tuple(replace(finding, status=Status(finding.status)) for finding in findings)


def _page(found: list[Report]) -> str:
    studies = [study for study in STUDIES if any(report.study == study for report in found)]
    shown = []
    for study in studies:
        ours = [report for report in found if report.study == study]
        columns = [Column(report.scale, report.size.partition(";")[0], report.verdicts, report.link) for report in ours]
        of = STUDIES[study]
        shown.append(
            {
                "title": of.title,
                "arxiv": of.arxiv,
                "about": of.about,
                "reports": ours,
                "table": scales_table(_claims(study), columns),
            }
        )
    header = render("header", kicker="fewbits", title=TITLE, arxiv="", about=ABOUT, tally="")
    body = render("index", style=style(), header=header, studies=shown)
    return document(TITLE, body, [STUDIES[study].title for study in studies], ABOUT)


def _claims(study: str) -> tuple[Claim, ...]:
    return load_claims(study).claims if study in studies_with_claims() else ()
