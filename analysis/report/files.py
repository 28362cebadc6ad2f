"""Write a report: the executed notebook of a study as a page, with its tables, figures and verdicts as files.

    REPORTS/STUDY-SCALE/index.html  STUDY.ipynb  results.parquet  verdicts.json  tables/*.csv  figures/*.svg|png

A report is made from `results.parquet`, so `fewbits report --from` makes the same files where the store is gone. The
notebook runs in a Jupyter kernel beside this archive, which its cells read. Each output brings its HTML and files for
the report under a private MIME type, which is removed from the stored notebook.

The folder is written under a temporary name and then replaces the previous folder, so a report is never incomplete.
`REPORTS/index.html` lists all reports with their counts of verdicts, which are read from each verdicts.json.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from fewbits.analysis.engine.results.archive import NAME, archived, read_archive
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import STUDIES as STUDY_FOLDERS
from fewbits.analysis.report.study_report import StudyReport, read_study, report_of
from fewbits.analysis.views.html import ASKED, PRIVATE, document, page, render
from fewbits.analysis.views.tables import tallies
from fewbits.common.atomic import folder_atomically, remove_folder, write_atomically
from fewbits.sweeps.planning.studies import STUDIES

INDEX = "index.html"
LONGEST = 1800  # seconds for one cell of a notebook


@dataclass(frozen=True)
class Written:
    """The facts that `fewbits report` prints about a report that it has just written."""

    index: Path  # the report's index.html
    verdicts: str  # the number of verdicts of each outcome, as text
    missing: tuple[str, ...]  # a line for each place (arm, axis values, seed) without a result


def write_report(overrides: Sequence[str], reports: Path, archives: Sequence[Path] = ()) -> Written:
    """Write the report of the selected study or, without overrides, of the one archive into the folder of reports."""
    read = [read_archive(path) for path in archives]
    if not overrides:
        (archive,) = read
        report = report_of(Results(archive.plan, archive), archive.overrides)
        return _written(report, archives[0].read_bytes(), reports)
    report = read_study(overrides, archives=read)
    return _written(report, archived(report.results, overrides), reports)


def _written(report: StudyReport, archive: bytes, reports: Path) -> Written:
    folder, study = reports / report.name, report.study

    def make() -> dict[str, str | bytes]:
        cells, notebook, brought = execute(STUDY_FOLDERS / study / "notebook.py", archive, folder.absolute())
        html = page(f"{STUDIES[study].title}: scale {report.scale}", cells, render("foot", study=study, archive=NAME))
        return {**brought, INDEX: html, f"{study}.ipynb": notebook, NAME: archive}

    replace_folder(folder, make)
    verdicts = json.loads((folder / "verdicts.json").read_text("utf-8"))
    return Written(folder / INDEX, verdicts["counts"], tuple(verdicts["flags"]))


def execute(source: Path, archive: bytes, report: Path) -> tuple[list[tuple[str, str]], str, dict[str, bytes]]:
    """Execute a notebook beside the archive; return the page's cells, the .ipynb file, and the report's other files."""
    import jupytext
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = jupytext.read(source)
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    with TemporaryDirectory() as folder:
        (Path(folder) / NAME).write_bytes(archive)
        options: dict[str, Any] = {
            "resources": {"metadata": {"path": folder}},
            "extra_arguments": ["--log-level=ERROR"],
        }
        client = NotebookClient(notebook, timeout=LONGEST, record_timing=False, **options)
        try:
            client.execute(env={**os.environ, ASKED: str(report), "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
        except CellExecutionError as error:
            raise ValueError(f"{source}: {error.ename}: {error.evalue}") from None
    cells: list[tuple[str, str]] = []
    files: dict[str, bytes] = {}
    for cell in notebook.cells:
        html = ""
        for output in cell.get("outputs", []):
            if (brought := output.get("data", {}).pop(PRIVATE, None)) is not None:
                html += brought["html"]
                files |= {name: base64.b64decode(content) for name, content in brought["files"].items()}
        if outputs := cell.get("outputs"):
            cell.outputs = [one for one in outputs if one.output_type != "stream" or one.name != "stderr"]
        cells.append((cell.source if cell.cell_type == "markdown" else "", html))
    nbformat.validate(notebook)
    return cells, str(nbformat.writes(notebook)) + "\n", files


def check_place(reports: Path) -> None:
    """Create the folder of all reports if it does not exist; raise ValueError if no file can be written there."""
    try:
        reports.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=reports):
            pass
    except OSError as error:
        raise ValueError(f"--out {reports}: no report can be written to this folder: {error.strerror}") from None


def replace_folder(folder: Path, make: Callable[[], Mapping[str, str | bytes]]) -> None:
    """Replace a report's folder by files that `make` returns; this can take minutes, so the folder is checked first."""
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has files but no index.html, so it is no report and is not replaced; choose another folder "
            "with --out"
        )
    check_place(folder.parent)
    contents = make()
    with folder_atomically(folder) as partial:
        for name, content in contents.items():
            path = partial / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        if folder.exists():
            remove_folder(folder)


# -------------------------------------------------------------------------------- the index of all reports


def write_index(reports: Path) -> Path:
    """Write `index.html` for all reports in a folder, and return its path; raise ValueError if there is no report."""
    pages = sorted(reports.glob(f"*/{INDEX}"))
    found = [row for path in pages if (row := _row(path.with_name("verdicts.json")))]
    if not found:
        raise ValueError(f"no report in {reports}; to write one: fewbits report study=NAME scale=NAME")
    studies = [(of, rows) for of in STUDIES.values() if (rows := [row for row in found if row["study"] == of.name])]
    title = "Pre-training in few bits: what was reproduced"
    body, index = render("index", title=title, studies=studies, page=INDEX), reports / INDEX
    write_atomically(index, document(title, body, [study.title for study, _ in studies]).encode())
    return index


def _row(file: Path) -> dict[str, Any] | None:
    """Return what the index shows of a report, from its verdicts.json; None if it is the file of something else."""
    try:
        record = json.loads(file.read_text("utf-8"))
        if "claims" not in record:
            return None
        row = {name: record[name] for name in ("study", "scale", "size")}
        warnings = sum(len(record[name]) for name in ("notices", "flags", "mixed"))
        return {**row, "folder": file.parent.name, "warnings": warnings, "counts": tallies(record["counts"])}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); write this report again, or remove its folder") from None
