"""Write the page of all reports in a folder: for each study and scale, the counts of verdicts and a link.

The verdicts are read from each report's verdicts.json, so the page agrees with the reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fewbits.analysis.engine.claims.findings import Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.schema import Kind
from fewbits.analysis.report.files import INDEX
from fewbits.analysis.report.page import document
from fewbits.analysis.views.claims import tally
from fewbits.analysis.views.html import render
from fewbits.common.atomic import write_atomically
from fewbits.common.from_dict import from_dict
from fewbits.sweeps.planning.studies import STUDIES

TITLE = "Pre-training in few bits: what was reproduced"


@dataclass(frozen=True)
class Report:
    """A report in the folder of reports, as its verdicts.json describes it."""

    study: str
    scale: str
    size: str  # the size of its runs as text
    folder: str  # the name of its folder
    warnings: int
    verdicts: Mapping[str, Verdict]  # by claim

    def row(self) -> dict[str, Any]:
        """Return what the page shows of the report."""
        of_kind = ((kind, [one for one in self.verdicts.values() if one.kind is kind]) for kind in Kind)
        return {
            "link": f"{self.folder}/{INDEX}",
            "scale": self.scale,
            "size": self.size,
            "warnings": self.warnings,
            "counts": [(str(kind), tally(members)) for kind, members in of_kind if members],
        }


def write_index(reports: Path) -> Path:
    """Write `index.html` for all reports in a folder, and return its path; raise ValueError if there is no report."""
    found = [report for path in sorted(reports.glob(f"*/{INDEX}")) if (report := _read(path)) is not None]
    if not found:
        raise ValueError(f"no report in {reports}; to write one: fewbits report study=NAME scale=NAME")
    studies = [
        (STUDIES[name], [one.row() for one in found if one.study == name])
        for name in STUDIES
        if any(one.study == name for one in found)
    ]
    body, index = render("index", title=TITLE, studies=studies), reports / INDEX
    write_atomically(index, document(TITLE, body, [study.title for study, _ in studies], "").encode())
    return index


def _read(page: Path) -> Report | None:
    """Return the report with this index.html; None if the page is no report."""
    file = page.with_name("verdicts.json")
    try:
        record = json.loads(file.read_text("utf-8"))
        if "claims" not in record:
            return None
        verdicts = {name: restored(claim) for name, claim in record["claims"].items()}
        warnings = sum(len(record[key]) for key in ("notices", "flags", "mixed"))
        return Report(record["study"], record["scale"], record["size"], page.parent.name, warnings, verdicts)
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
