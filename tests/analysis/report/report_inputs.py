"""Inputs for tests of reports: simulated stores of the studies, the page that a notebook would show, and a parser."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import jupytext
import pytest
from markdown_it import MarkdownIt

from fewbits import cli
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import STUDIES
from fewbits.analysis.report.study_report import StudyReport, report_of
from fewbits.analysis.views import shown
from fewbits.sweeps.planning.stored_plans import save_plan
from tests.analysis import worlds


@dataclass
class Page(HTMLParser):
    """A parser that collects a page's links, loaded files, ids and text."""

    links: list[str] = field(default_factory=list)  # targets of <a>
    loaded: list[str] = field(default_factory=list)  # addresses that a browser would load, such as images
    ids: list[str] = field(default_factory=list)
    words: str = ""  # the text
    _inside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {key: value or "" for key, value in attrs}
        self._inside.append(tag)
        if "href" in said:
            (self.links if tag == "a" else self.loaded).append(said["href"])
        self.loaded += [said[key] for key in ("src", "srcset", "data", "poster") if key in said]
        self.ids += [said["id"]] if "id" in said else []

    def handle_data(self, data: str) -> None:
        if "style" not in self._inside and "script" not in self._inside:
            self.words += f"{data} "

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass


def parsed(html: str) -> Page:
    """Return the parsed page."""
    page = Page()
    page.feed(html)
    return page


def simulated(study: str, scale: str, folder: Path, cache: Path) -> Results:
    """Return the results of a study's simulated store, which lies in `folder` and has a stored plan."""
    of = worlds.planned(study, folder, cache, f"scale={scale}")
    world = import_module(f"tests.analysis.{study}.worlds").World()
    save_plan(of, (f"study={study}", f"scale={scale}", *worlds.SMALL))
    return worlds.results(of, world)


def shown_page(study: str, scale: str, results: Results, monkeypatch: pytest.MonkeyPatch) -> tuple[StudyReport, str]:
    """Return the report, and the HTML of all cells of the study's notebook without figures, without a kernel."""
    monkeypatch.setattr(shown, "svg", lambda figure: "<svg>")
    report = report_of(results, (f"study={study}", f"scale={scale}"))
    parts: list[str] = []
    for cell in jupytext.read(STUDIES / study / "notebook.py").cells:
        if cell.cell_type == "markdown":
            parts.append(MarkdownIt("commonmark").render(cell.source))
        elif match := re.search(rf"^{study}\.(\w+)\((.*)\)$", cell.source, re.MULTILINE):
            names = re.findall(r'"([^"]+)"', match[2])
            parts.append(str(getattr(report, match[1])(*names).report_html))
    return report, "".join(parts)


@dataclass(frozen=True)
class Made:
    """A store, and the folder of reports."""

    store: Path
    reports: Path

    @property
    def overrides(self) -> list[str]:
        """The arguments of commands that select the study and its store."""
        return ["study=mor", "scale=smoke", *worlds.SMALL, "--runs", str(self.store)]

    def report(self, *more: str, reports: Path | None = None) -> int:
        """Run `fewbits report` with further arguments, and return its exit status."""
        return cli.main(["report", *self.overrides, "--out", str(reports or self.reports), *more])

    @property
    def folder(self) -> Path:
        return self.reports / "mor-smoke"


def left(folder: Path) -> dict[str, bytes]:
    """Return {relative path: content} of all files in a folder and its subfolders."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
