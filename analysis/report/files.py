"""Write a report: the executed notebook of a study as a page, with its tables, figures and verdicts as files.

    REPORTS/STUDY-SCALE/index.html  STUDY.ipynb  verdicts.json  tables/*.csv|tex  figures/*.svg|png  made-of.json

The folder is written under a temporary name and then replaces the previous folder, so a report is never incomplete.
A report is not written again if neither the results nor the code have changed (`fingerprint.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from markupsafe import Markup

from fewbits.analysis.engine.results.paper import STUDIES as STUDY_FOLDERS
from fewbits.analysis.report.fingerprint import MADE_OF, made_of, record, unchanged
from fewbits.analysis.report.items import FigureResult, TableResult
from fewbits.analysis.report.notebook import execute
from fewbits.analysis.report.page import page
from fewbits.analysis.report.study_report import StudyReport, read_study
from fewbits.analysis.tidy.selection import notebook_parameters
from fewbits.analysis.views.numbers import anchor
from fewbits.analysis.views.tables import latex
from fewbits.common.atomic import folder_atomically, remove_folder
from fewbits.sweeps.planning.studies import STUDIES

INDEX = "index.html"


@dataclass(frozen=True)
class Written:
    """The facts that `fewbits report` prints about a report that it has just written, or that was up to date."""

    index: Path  # the report's index.html
    verdicts: str  # the number of verdicts of each outcome, as text
    missing: tuple[str, ...]  # a line for each place (arm, axis values, seed) without a result


def write_report(overrides: Sequence[str], reports: Path) -> Written:
    """Write the report of the study that the overrides select, and send it to MLflow if MLflow has the study's sweeps.

    overrides: as for `fewbits sweep`, for example `study=mor scale=cpu`. reports: the folder of all reports.
    """
    planned = read_study(overrides)
    set_in = notebook_parameters(planned.overrides, planned.scale, planned.results.plan.store)
    folder, digest = reports / planned.name, made_of(planned.results, tuple(map(str, set_in.values())))
    if not unchanged(folder, digest):
        replace_folder(folder, lambda: _files(planned.study, set_in), digest)
    verdicts = json.loads((folder / "verdicts.json").read_text("utf-8"))
    return Written(folder / INDEX, verdicts["counts"], planned.results.flags)


def _files(study: str, set_in: Mapping[str, Any]) -> dict[str, str | bytes]:
    executed = execute(STUDY_FOLDERS / study / "notebook.py", set_in)
    report: StudyReport = executed.names[study]
    if unshown := list(report.unshown()):
        raise ValueError(f"the notebook of {study} does not show {', '.join(unshown)}; add cells that show them")
    title = f"{STUDIES[study].title}: scale {report.scale}"
    foot = Markup(
        'The notebook <a href="{0}.ipynb">{0}.ipynb</a> has the code behind every number. Verdicts, tables and figures '
        "are also files in this page's folder."
    ).format(study)
    return {
        INDEX: page(executed, title, foot),
        f"{study}.ipynb": _notebook(executed.notebook),
        "verdicts.json": to_json(report.record()),
        **_tables(report),
        **_figures(report),
    }


def check_place(reports: Path) -> None:
    """Create the folder of all reports if it does not exist; raise ValueError if no file can be written there."""
    try:
        reports.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=reports):
            pass
    except OSError as error:
        raise ValueError(f"--out {reports}: no report can be written to this folder: {error.strerror}") from None


def replace_folder(folder: Path, make: Callable[[], Mapping[str, str | bytes]], inputs_digest: str) -> None:
    """Replace a report's folder by a new one with the files that `make` returns.

    make: returns the contents of the files by their paths in the folder. `make` can take minutes, so the folder is
    checked first. Raise ValueError if the folder has files but no index.html, or if it cannot be written.
    inputs_digest: the result of `fingerprint.made_of`, which is stored in made-of.json.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has files but no index.html, so it is no report and is not replaced; choose another folder "
            "with --out"
        )
    check_place(folder.parent)
    contents = {name: text.encode() if isinstance(text, str) else text for name, text in make().items()}
    contents[MADE_OF] = record(inputs_digest, contents)
    with folder_atomically(folder) as partial:
        for name, content in contents.items():
            path = partial / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        if folder.exists():
            remove_folder(folder)


def _notebook(notebook: object) -> str:
    import nbformat

    nbformat.validate(notebook)
    return str(nbformat.writes(notebook)) + "\n"


def to_json(record: object) -> str:
    """Return a record as indented JSON that ends with a line feed; raise ValueError for NaN and infinity."""
    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _tables(report: StudyReport) -> dict[str, str]:
    titles = {entry.id: entry.title for entry in report.registry.tables}
    files = {}
    for name, result in report.tables.items():
        if isinstance(result, TableResult):
            files[f"tables/{anchor(name)}.csv"] = result.frame().to_csv(index=False)
            files[f"tables/{anchor(name)}.tex"] = latex(result, titles[name])
    return files


def _figures(report: StudyReport) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {}
    for name, result in report.figures.items():
        if isinstance(result, FigureResult):
            drawing, stem = report.drawing(name), f"figures/{anchor(name)}"
            files |= {f"{stem}.svg": drawing.light, f"{stem}-dark.svg": drawing.dark, f"{stem}.png": drawing.png}
    return files
