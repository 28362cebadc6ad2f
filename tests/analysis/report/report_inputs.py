"""Inputs for tests of reports: a small study that replaces MoR's tables, figures and claims, and a parser of pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from fewbits import cli
from fewbits.analysis.engine.claims import judging
from fewbits.analysis.engine.claims.hooks import hooks_of
from fewbits.analysis.engine.claims.schema import StudyClaims
from fewbits.analysis.engine.results.data import Exact, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import sample
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.report import index, registry, study_report
from fewbits.analysis.report.items import FigureResult, Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.registry import StudyRegistry
from fewbits.common.from_dict import from_dict

USUAL = {"recipe.threshold": "0.045"}
CLAIMS = """
study: mor
controls:
  - id: wild
    title: a wild arm is found to be worse
    parts: [{test: higher, arms: [wild], metrics: [loss], margin: {value: 0.005, relative: true, reason: r}}]
claims:
  - {id: M1, statement: No block saturates., source: {place: s. 2, sentence: "no <saturation>"}, parts: [{test: exact}]}
  - id: M3
    statement: Both thresholds train to the loss of BF16.
    source: {place: Table 2, sentence: within half a percent}
    control: [wild]
    margin: {value: 0.005, reason: the paper's own bound}
    parts:
      - {test: equal, arms: [mor], metrics: [loss], where: {recipe.threshold: "0.0001"}}
      - {test: equal, arms: [mor], metrics: [loss], where: {recipe.threshold: "0.045"}}
  - id: M4
    statement: Scores are alike.
    source: {place: Table 2, sentence: alike}
    parts: [{name: MMLU, needs: {other: too large}}]
  - id: M10
    statement: More data.
    source: {place: Figure 10, sentence: more}
    parts: [{test: higher, arms: [absent]}]
  - id: own-1
    statement: Nothing passes a threshold of 0.01 %.
    margin: {value: 0.001, relative: true, reason: r}
    parts: [{test: equal, arms: [mor], metrics: [loss], where: {recipe.threshold: "0.0001"}}]
"""


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace MoR's tables, figures and claims with a few that use the arms bf16, mor and wild of ../conftest.py."""
    claims = from_dict(StudyClaims, yaml.safe_load(CLAIMS))
    for module in (study_report, judging, index):
        monkeypatch.setattr(module, "load_claims", lambda study: claims)
    monkeypatch.setitem(hooks_of("mor").exact, "M1", lambda: {"": Exact(True, "no block saturates")})
    monkeypatch.setattr(judging, "load_hooks", lambda study: None)
    made = StudyRegistry("mor")
    made.add_table("Table 4", _table_4)
    made.add_table("settings", _settings, "What was set")
    made.add_figure("Figure 10", _figure_10)
    made.add_figure("Figure 6", lambda results: NotPlanned(f"not run at this scale ({results.scale_name})"))
    monkeypatch.setattr(registry, "_REGISTRIES", {"mor": made})
    monkeypatch.setattr(registry, "load", lambda registry: None)


def _table_4(results: Results) -> TableResult:
    own = paper("mor").table("Table 4")
    missing = NotPlanned(f"not run at this scale ({results.scale_name})")
    cells = (
        TableCell(
            Value.of(sample(results, "validation_loss", "bf16")), own.value("validation_loss", "bf16"), "printed"
        ),
        TableCell(Value.of(sample(results, "validation_loss", "mor", USUAL)), 1.7956, "printed"),
        TableCell(missing, 1.7777, "printed"),
    )
    unreached = tuple(TableCell(missing, own.value("mmlu", column.id)) for column in own.columns)
    rows = (TableRow("Validation loss", cells, "nats"), TableRow("MMLU & more", unreached, "%"))
    return TableResult(tuple(column.title for column in own.columns), rows, ("Two seeds.",))


def _settings(results: Results) -> TableResult:
    one = TableCell(Setting("1e-3", (str(results.trials["id"][0]),), assumed=True))
    return TableResult(("Ours",), (TableRow("Learning rate", (one,)),))


def _figure_10(results: Results) -> FigureResult:
    def draw() -> object:
        from fewbits.analysis.figures.panels import panels

        made, [[axes]] = panels(1, 1, 1.0)
        axes.plot(results.curves("loss")["value"])
        return made

    return FigureResult(draw, tuple(results.trials["id"].unique()))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------- a report, and what it says


@dataclass
class Page(HTMLParser):
    """A parser that collects a page's links, loaded files, ids, tags, tooltips, styles and text."""

    links: list[str] = field(default_factory=list)  # targets of <a>
    loaded: list[str] = field(default_factory=list)  # addresses that a browser would load, such as images
    ids: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    words: str = ""  # the text
    titles: list[str] = field(default_factory=list)  # tooltips
    styles: str = ""
    _inside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {key: value or "" for key, value in attrs}
        self.tags.append(tag)
        self._inside.append(tag)
        if "href" in said:
            (self.links if tag == "a" else self.loaded).append(said["href"])
        self.loaded += [said[key] for key in ("src", "srcset", "data", "poster") if key in said]
        self.ids += [said["id"]] if "id" in said else []
        self.titles += [said["title"]] if "title" in said else []
        self.styles += said.get("style", "")

    def handle_data(self, data: str) -> None:
        if "style" in self._inside:
            self.styles += data
        else:
            self.words += data

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass


def read_page(path: Path) -> Page:
    """Return the parsed page of this HTML file."""
    page = Page()
    page.feed(path.read_text("utf-8"))
    return page


@dataclass(frozen=True)
class Made:
    """The sweep file and store that a report is made from, and the folder of reports."""

    file: Path  # the sweep file
    store: Path
    reports: Path

    @property
    def overrides(self) -> list[str]:
        """The arguments of commands that select the sweep and its store."""
        return [str(self.file), "--runs", str(self.store)]

    def report(self, *more: str, reports: Path | None = None) -> int:
        """Run `fewbits report` with further arguments, and return its exit status."""
        return cli.main(["report", *self.overrides, "--out", str(reports or self.reports), *more])

    @property
    def folder(self) -> Path:
        return self.reports / "mor-smoke"

    @property
    def page(self) -> Page:
        return read_page(self.folder / "index.html")


def left(folder: Path) -> dict[str, bytes]:
    """Return {relative path: content} of all files in a folder and its subfolders."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
