"""Write a report: the executed notebook of a study as a page, with its tables, figures and verdicts as files.

    REPORTS/STUDY-SCALE/index.html  STUDY.ipynb  results.parquet  verdicts.json  tables/*.csv  figures/*.svg|png

A report is made from `results.parquet`, so `fewbits report --from` makes the same files where the store is gone. The
folder is written under a temporary name and then replaces the previous folder, so a report is never incomplete. A
report is not written again if neither the results nor the code have changed: made-of.json has the digests.
`REPORTS/index.html` lists all reports with their counts of verdicts, which are read from each verdicts.json.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from fewbits.analysis.engine.results.archive import NAME, Archive, archived, read_archive
from fewbits.analysis.engine.results.paper import STUDIES as STUDY_FOLDERS
from fewbits.analysis.report.page import document, execute, page, stored
from fewbits.analysis.report.study_report import archived_report, read_study
from fewbits.analysis.views.claims import tallies
from fewbits.analysis.views.html import render
from fewbits.analysis.views.provenance import SOURCES, sources
from fewbits.common.atomic import folder_atomically, remove_folder, write_atomically
from fewbits.sweeps.planning.studies import STUDIES

INDEX, MADE_OF = "index.html", "made-of.json"
PACKAGES = ("torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "jupytext", "nbclient", "jinja2")


@dataclass(frozen=True)
class Written:
    """The facts that `fewbits report` prints about a report that it has just written, or that was up to date."""

    index: Path  # the report's index.html
    verdicts: str  # the number of verdicts of each outcome, as text
    missing: tuple[str, ...]  # a line for each place (arm, axis values, seed) without a result


def write_report(overrides: Sequence[str], reports: Path) -> Written:
    """Write the report of the study that the overrides select.

    overrides: as for `fewbits sweep`, for example `study=mor scale=cpu`. reports: the folder of all reports.
    """
    return _written(archived(read_study(list(overrides)).results, overrides), reports)


def rewrite_report(archive: Path, reports: Path) -> Written:
    """Write the report of the results in a file results.parquet; the store is not needed."""
    read_archive(archive)
    return _written(archive.read_bytes(), reports)


def _written(archive: bytes, reports: Path) -> Written:
    report = archived_report(Archive(archive))
    folder, study = reports / report.name, report.study
    parts = [_digest(archive), sources(SOURCES), platform.python_version(), *map(version, PACKAGES)]

    def make() -> dict[str, str | bytes]:
        executed = execute(STUDY_FOLDERS / study / "notebook.py", archive, folder.absolute())
        title = f"{STUDIES[study].title}: scale {report.scale}"
        foot = render("foot", study=study, archive=NAME)
        own = {INDEX: page(executed, title, foot), f"{study}.ipynb": stored(executed.notebook), NAME: archive}
        return {**own, **executed.files}

    digest = _digest(json.dumps(parts).encode())
    if not unchanged(folder, digest):
        replace_folder(folder, make, digest)
    verdicts = json.loads((folder / "verdicts.json").read_text("utf-8"))
    return Written(folder / INDEX, verdicts["counts"], tuple(verdicts["flags"]))


def check_place(reports: Path) -> None:
    """Create the folder of all reports if it does not exist; raise ValueError if no file can be written there."""
    try:
        reports.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=reports):
            pass
    except OSError as error:
        raise ValueError(f"--out {reports}: no report can be written to this folder: {error.strerror}") from None


def replace_folder(folder: Path, make: Callable[[], Mapping[str, str | bytes]], inputs_digest: str) -> None:
    """Replace a report's folder by a new one with the files that `make` returns, as contents by path in the folder.

    `make` can take minutes, so the folder is checked first. Raise ValueError if the folder has files but no index.html,
    or if it cannot be written. inputs_digest: the digest of the report's inputs, which is stored in made-of.json.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has files but no index.html, so it is no report and is not replaced; choose another folder "
            "with --out"
        )
    check_place(folder.parent)
    contents = {name: text.encode() if isinstance(text, str) else text for name, text in make().items()}
    digests = {name: _digest(content) for name, content in contents.items()}
    contents[MADE_OF] = (json.dumps({"made of": inputs_digest, "files": digests}, indent=2) + "\n").encode()
    with folder_atomically(folder) as partial:
        for name, content in contents.items():
            path = partial / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        if folder.exists():
            remove_folder(folder)


def unchanged(folder: Path, inputs_digest: str) -> bool:
    """Tell whether the folder has a report whose inputs had this digest, with no file changed since it was written."""
    try:
        record = json.loads((folder / MADE_OF).read_text("utf-8"))
        return record["made of"] == inputs_digest and all(
            _digest((folder / name).read_bytes()) == digest for name, digest in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
    write_atomically(index, document(title, body, [study.title for study, _ in studies], "").encode())
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
