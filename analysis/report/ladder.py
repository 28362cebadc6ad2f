"""The scale ladder: what several scales show of each claim, side by side, on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fewbits.analysis.report.files import INDEX, Written, replace_folder, to_json
from fewbits.analysis.report.fingerprint import made_of
from fewbits.analysis.report.page import document
from fewbits.analysis.report.scales import Column, scales_table
from fewbits.analysis.report.study_report import StudyReport, read_study
from fewbits.analysis.views.claims import counts, tally
from fewbits.analysis.views.html import render, style
from fewbits.sweeps.planning.studies import STUDIES

ABOUT = "The same claims, judged at each scale by itself. What holds at one need not hold at the next."


def write_ladder(overrides: Sequence[str], scales: Sequence[str], reports: Path) -> Written:
    """Write the page of the study that the overrides name, at each of the scales."""
    if len(scales) < 2 or len(set(scales)) != len(scales):
        raise ValueError(f"--compare {' '.join(scales)}: two scales or more are expected, each once")
    if given := [override for override in overrides if override.startswith("scale=")]:
        raise ValueError(f"{given[0]} and --compare {' '.join(scales)}: give scales once")
    found = {scale: read_study((*overrides, f"scale={scale}")) for scale in scales}
    folder = reports / "-".join((found[scales[0]].study, *scales))
    digests = [made_of(report.results, (*report.overrides, report.changed)) for report in found.values()]
    replace_folder(folder, lambda: _files(found), " ".join(digests))
    missing = tuple(f"{scale}: {flag}" for scale, report in found.items() for flag in report.results.flags)
    verdicts = "; ".join(f"{scale}: {counts(report.verdicts)}" for scale, report in found.items())
    notes = tuple(f"{scale}: {note}" for scale, report in found.items() for note in report.notes)
    return Written(folder / INDEX, verdicts, missing, notes)


def _files(found: Mapping[str, StudyReport]) -> dict[str, str]:
    record = {scale: report.record() for scale, report in found.items()}
    return {INDEX: _page(found), "verdicts.json": to_json(record)}


def _page(found: Mapping[str, StudyReport]) -> str:
    first = next(iter(found.values()))
    title = STUDIES[first.study].title
    claims = [verdict.claim for verdict in first.verdicts.values()]
    body = render(
        "ladder",
        style=style(),
        header=render("header", kicker="fewbits scale ladder", title=title, arxiv="", about=ABOUT, tally=""),
        scales=[
            {
                "name": scale,
                "size": report.size,
                "tally": tally(report.verdicts.values()),
                "flags": [*report.origin.notices, *report.results.flags, *report.origin.mixed],
            }
            for scale, report in found.items()
        ],
        table=scales_table(
            claims, [Column(scale, report.results.scale, report.verdicts) for scale, report in found.items()]
        ),
        reasons=[
            (claim, [(scale, str(report.verdicts[claim.id])) for scale, report in found.items()]) for claim in claims
        ],
    )
    return document(f"{title}: scales {', '.join(found)}", body, ["Claims", "Reasons"], ABOUT)
