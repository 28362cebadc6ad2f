"""A small shelf in place of MoR's own, over tiny trials, and what a page says read back from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.analysis import registry
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import Claim, Margin, paper
from fewbits.analysis.registry import claim, control, figure, table
from fewbits.analysis.results import FigureResult, NotRun, Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.verdicts import Verdict, equivalent, every, exact, higher, not_run

STRICT, USUAL = {"recipe.threshold": "0.0001"}, {"recipe.threshold": "0.045"}
OWN = Claim("own-1", "Nothing passes a threshold of 0.01 %.", "", "equal", "loss", margin=Margin(0.001, True, "r"))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table, a figure and some claims of each kind of outcome, for a plan of the arms bf16, mor and wild."""
    monkeypatch.setattr(registry, "_SHELVES", {})
    monkeypatch.setattr(registry, "load", lambda study: None)
    table("mor", "Table 4")(_table_4)
    table("mor", "settings", "What was set")(_settings)
    figure("mor", "Figure 10")(_figure_10)
    figure("mor", "Figure 6")(lambda results: NotRun(results.scale_name))
    control("mor", "bad-arm", "a wild arm is told from BF16")(
        lambda results: higher(results.paired("loss", "wild", "bf16"))
    )
    claim("mor", "M1")(lambda results: exact(True, "no block saturates"))
    claim("mor", "M3")(_m3)
    claim("mor", "M10")(lambda results: not_run(results.scale_name))
    claim("mor", "own-1", OWN)(lambda results: equivalent(results.paired("loss", "mor", "bf16", STRICT), 0.001))


def _table_4(results: Results) -> TableResult:
    own = paper("mor").table("Table 4")
    cells = (
        TableCell(Value.of(results.sample("validation_loss", "bf16")), own.value("validation_loss", "bf16"), "printed"),
        TableCell(Value.of(results.sample("validation_loss", "mor", USUAL)), 1.7956, "printed"),
        TableCell(NotRun(results.scale_name), 1.7777, "printed"),
    )
    unreached = tuple(TableCell(NotRun(results.scale_name), own.value("mmlu", column.id)) for column in own.columns)
    rows = (TableRow("Validation loss", cells, "nats"), TableRow("MMLU & more", unreached, "%"))
    return TableResult(tuple(column.title for column in own.columns), rows, ("Two seeds.",))


def _settings(results: Results) -> TableResult:
    one = TableCell(Setting("1e-3", (str(results.trials["id"][0]),), assumed=True))
    return TableResult(("Ours",), (TableRow("Learning rate", (one,)),))


def _figure_10(results: Results) -> FigureResult:
    def draw() -> object:
        from fewbits.analysis.plots import panels

        made, [[axes]] = panels(1, 1, 1.0)
        axes.plot(results.curves("loss")["value"])
        return made

    return FigureResult(draw, tuple(results.trials["id"].unique()))  # type: ignore[arg-type]


def _m3(results: Results) -> Verdict:
    parts = {
        name: results.paired("loss", "mor", "bf16", where) for name, where in (("strict", STRICT), ("mild", USUAL))
    }
    return every({name: equivalent(found, 0.005) for name, found in parts.items()})


# -------------------------------------------------------------------------------- a report, and what it says


@dataclass
class Page(HTMLParser):
    """Of a page: what it refers to, what can be referred to in it, its headings and its words."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)  # what a browser would fetch
    ids: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    words: str = ""
    titles: list[str] = field(default_factory=list)  # told to pointers
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
        if self._inside[-1:] == ["style"] or "style" in self._inside:
            self.styles += data
        else:
            self.words += data

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass


def read_page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text("utf-8"))
    return page


@dataclass(frozen=True)
class Made:
    """What it takes to make a report."""

    file: Path  # the sweep
    store: Path
    reports: Path

    @property
    def words(self) -> list[str]:
        return [str(self.file), "--runs", str(self.store)]

    def report(self, *more: str, reports: Path | None = None) -> int:
        return cli.main(["report", *self.words, "--out", str(reports or self.reports), *more])

    @property
    def folder(self) -> Path:
        return self.reports / "mor-smoke"

    @property
    def page(self) -> Page:
        return read_page(self.folder / "index.html")


def left(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
