"""Write the scale ladder: one page that shows the verdicts on a study's claims at several scales side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fewbits.analysis.report.files import INDEX, Written, replace_folder, to_json
from fewbits.analysis.report.fingerprint import made_of
from fewbits.analysis.report.page import document
from fewbits.analysis.report.scales import Column, scales_table
from fewbits.analysis.report.study_report import StudyReport, read_study
from fewbits.analysis.views.claims import counts, tally
from fewbits.analysis.views.html import render
from fewbits.sweeps.planning.studies import STUDIES

ABOUT = "The verdicts at a scale use only the runs of this scale. A verdict may differ at another scale."


def write_ladder(overrides: Sequence[str], scales: Sequence[str], reports: Path) -> Written:
    """Write the page that compares these scales of a study, in the folder STUDY-SCALE-SCALE… of `reports`.

    overrides: as for `fewbits sweep`, for example `study=mor`, without the scale. Return what `fewbits report` prints
    about the page: its path, the counts of verdicts, the places without a result, and notes.

    Raise ValueError for fewer than two scales, for a scale that is given twice, or if `overrides` has a scale.
    """
    if len(scales) < 2 or len(set(scales)) != len(scales):
        raise ValueError(f"--compare {' '.join(scales)}: give at least two scales, and each only once")
    if chosen := [override for override in overrides if override.startswith("scale=")]:
        raise ValueError(
            f"{chosen[0]} cannot be combined with --compare {' '.join(scales)}: name scales only after --compare"
        )
    reports_by_scale = {scale: read_study((*overrides, f"scale={scale}")) for scale in scales}
    folder = reports / "-".join((reports_by_scale[scales[0]].study, *scales))
    digests = [made_of(report.results, (*report.overrides, report.changed)) for report in reports_by_scale.values()]
    replace_folder(folder, lambda: _files(reports_by_scale), " ".join(digests))
    missing = tuple(f"{scale}: {flag}" for scale, report in reports_by_scale.items() for flag in report.results.flags)
    verdicts = "; ".join(f"{scale}: {counts(report.verdicts)}" for scale, report in reports_by_scale.items())
    notes = tuple(f"{scale}: {note}" for scale, report in reports_by_scale.items() for note in report.notes)
    return Written(folder / INDEX, verdicts, missing, notes)


def _files(reports: Mapping[str, StudyReport]) -> dict[str, str]:
    record = {scale: report.record() for scale, report in reports.items()}
    return {INDEX: _page(reports), "verdicts.json": to_json(record)}


def _page(reports: Mapping[str, StudyReport]) -> str:
    first = next(iter(reports.values()))
    title = STUDIES[first.study].title
    claims = [verdict.claim for verdict in first.verdicts.values()]
    body = render(
        "ladder",
        header=render("header", kicker="fewbits scale ladder", title=title, arxiv="", about=ABOUT, tally=""),
        scales=[
            {
                "name": scale,
                "size": report.size,
                "tally": tally(report.verdicts.values()),
                "flags": [*report.origin.notices, *report.results.flags, *report.origin.mixed],
            }
            for scale, report in reports.items()
        ],
        table=scales_table(
            claims, [Column(scale, report.results.scale, report.verdicts) for scale, report in reports.items()]
        ),
        reasons=[
            (claim, [(scale, str(report.verdicts[claim.id])) for scale, report in reports.items()]) for claim in claims
        ],
    )
    return document(f"{title}: scales {', '.join(reports)}", body, ["Claims", "Reasons"], ABOUT)
