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

from fewbits.analysis.fingerprint import MADE_OF, made_of, record, unchanged
from fewbits.analysis.notebook import execute
from fewbits.analysis.page import page
from fewbits.analysis.reading import Reading, read
from fewbits.analysis.results import TableResult
from fewbits.analysis.show import tables
from fewbits.analysis.show.markup import anchor, tag
from fewbits.common.atomic import folder_atomically, remove_folder
from fewbits.common.from_dict import one_of
from fewbits.sweeps.planning.studies import STUDIES

NOTEBOOKS = Path(__file__).with_name("notebooks")
INDEX = "index.html"


@dataclass(frozen=True)
class Report:
    index: Path
    verdicts: str  # how many of each
    missing: tuple[str, ...]  # places without a result
    notes: tuple[str, ...] = ()  # about the plan that was read


def write_report(sentence: Sequence[str], reports: Path) -> Report:
    """Of the study that the words name, as `fewbits sweep` takes them."""
    planned = read(sentence)
    folder, digest = reports / planned.name, made_of(planned.results, (*planned.sentence, planned.changed))
    if not unchanged(folder, digest):
        put(folder, lambda: _files(planned.study, sentence), digest)
    verdicts = json.loads((folder / "verdicts.json").read_text("utf-8"))
    return Report(folder / INDEX, verdicts["counts"], planned.results.flags, planned.notes)


def _files(study: str, sentence: Sequence[str]) -> dict[str, str | bytes]:
    notebooks = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.py"))}
    one_of("study with a report", study, notebooks)
    done = execute(notebooks[study], {"words": list(sentence)})
    reading: Reading = done.names[study]
    if left := list(reading.unshown()):
        raise ValueError(f"the notebook of {study} does not show {', '.join(left)}")
    title = f"{STUDIES[study].title}: scale {reading.scale}"
    code = f"The code of every number is in {tag('a', f'{study}.ipynb', href=f'{study}.ipynb')}"
    return {
        INDEX: page(done.notebook, title, f"{code}; verdicts, tables and figures lie beside this page."),
        f"{study}.ipynb": _notebook(done.notebook),
        "verdicts.json": to_json(reading.record()),
        **_tables(reading),
        **_figures(reading),
    }


def check_place(reports: Path) -> None:
    """ValueError where no report can be written."""
    try:
        reports.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=reports):
            pass
    except OSError as error:
        raise ValueError(f"--out {reports}: {error.strerror}: no report can be written there") from None


def put(folder: Path, make: Callable[[], Mapping[str, str | bytes]], made_of: str) -> None:
    """All files that it makes, in place of what a report made earlier has left there. Where none can be written, that
    is found before they are made, which takes a while."""
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX).is_file():
        raise ValueError(f"{folder} holds something that is no report: say with --out where reports are to lie")
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
    return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _tables(reading: Reading) -> dict[str, str]:
    titles = {entry.id: entry.title for entry in reading.shelf.tables}
    files = {}
    for name, made in reading.made_tables.items():
        if isinstance(made, TableResult):
            files[f"tables/{anchor(name)}.csv"] = made.frame().to_csv(index=False)
            files[f"tables/{anchor(name)}.tex"] = tables.latex(made, titles[name])
    return files


def _figures(reading: Reading) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {}
    for name, drawing in reading.drawings.items():
        stem = f"figures/{anchor(name)}"
        files |= {f"{stem}.svg": drawing.light, f"{stem}-dark.svg": drawing.dark, f"{stem}.png": drawing.png}
    return files
