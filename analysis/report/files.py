"""A report as files: the notebook of a study, executed, as a page, with all that it shows beside it.

    REPORTS/STUDY-SCALE/index.html  STUDY.ipynb  verdicts.json  tables/*.csv|tex  figures/*.svg|png  made-of.json

The folder is there whole or not at all: it is made under another name, and then takes the place of the one before it.
Equal results of equal code give equal bytes, so where nothing has changed since (see `fingerprint`) nothing is done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from markupsafe import Markup

from fewbits.analysis.report.fingerprint import MADE_OF, made_of, record, unchanged
from fewbits.analysis.report.items import TableResult
from fewbits.analysis.report.notebook import execute
from fewbits.analysis.report.page import page
from fewbits.analysis.report.study_report import StudyReport, read_study
from fewbits.analysis.views.numbers import anchor
from fewbits.analysis.views.tables import latex
from fewbits.common.atomic import folder_atomically, remove_folder
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.studies import STUDIES

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
INDEX = "index.html"


@dataclass(frozen=True)
class Written:
    """A report that was written, or was there already."""

    index: Path
    verdicts: str  # how many of each outcome
    missing: tuple[str, ...]  # places without a result
    notes: tuple[str, ...] = ()  # about the plan that was read


def write_report(overrides: Sequence[str], reports: Path) -> Written:
    """Write the report of the study that the overrides name, as `fewbits sweep` takes them."""
    planned = read_study(overrides)
    folder, digest = reports / planned.name, made_of(planned.results, (*planned.overrides, planned.changed))
    if not unchanged(folder, digest):
        replace_folder(folder, lambda: _files(planned.study, overrides), digest)
    verdicts = json.loads((folder / "verdicts.json").read_text("utf-8"))
    return Written(folder / INDEX, verdicts["counts"], planned.results.flags, planned.notes)


def _files(study: str, overrides: Sequence[str]) -> dict[str, str | bytes]:
    notebooks = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.py"))}
    one_of("study with a report", study, notebooks)
    done = execute(notebooks[study], {"overrides": list(overrides)})
    report: StudyReport = done.names[study]
    if left := list(report.unshown()):
        raise ValueError(f"the notebook of {study} does not show {', '.join(left)}")
    title = f"{STUDIES[study].title}: scale {report.scale}"
    foot = Markup(
        'The code of every number is in <a href="{0}.ipynb">{0}.ipynb</a>; verdicts, tables and figures are files '
        "beside this page."
    ).format(study)
    return {
        INDEX: page(done.notebook, title, foot),
        f"{study}.ipynb": _notebook(done.notebook),
        "verdicts.json": to_json(report.record()),
        **_tables(report),
        **_figures(report),
    }


def check_place(reports: Path) -> None:
    """Raise ValueError where no report can be written."""
    try:
        reports.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=reports):
            pass
    except OSError as error:
        raise ValueError(f"--out {reports}: {error.strerror}: no report can be written there") from None


def replace_folder(folder: Path, make: Callable[[], Mapping[str, str | bytes]], made_of: str) -> None:
    """Replace a report's folder by the files that `make` returns, which takes a while: the place is checked before."""
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX).is_file():
        raise ValueError(f"{folder} is no report and is not replaced; choose another folder with --out")
    check_place(folder.parent)
    contents = {name: text.encode() if isinstance(text, str) else text for name, text in make().items()}
    contents[MADE_OF] = record(made_of, contents)
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
    """Return a record as JSON, the same text for the same record."""
    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _tables(report: StudyReport) -> dict[str, str]:
    titles = {entry.id: entry.title for entry in report.registry.tables}
    files = {}
    for name, item in report.tables.items():
        if isinstance(item.result, TableResult):
            files[f"tables/{anchor(name)}.csv"] = item.frame.to_csv(index=False)
            files[f"tables/{anchor(name)}.tex"] = latex(item.result, titles[name])
    return files


def _figures(report: StudyReport) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {}
    for name, item in report.figures.items():
        if (drawing := item.drawing) is not None:
            stem = f"figures/{anchor(name)}"
            files |= {f"{stem}.svg": drawing.light, f"{stem}-dark.svg": drawing.dark, f"{stem}.png": drawing.png}
    return files
