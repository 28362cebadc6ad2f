"""Test reports: their first screen and size, that they are made from results.parquet alone, and their folder."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from fewbits import cli, read
from fewbits.analysis.engine.claims.findings import Finding, Status
from fewbits.analysis.engine.claims.judging import judge_study
from fewbits.analysis.engine.statistics import Interval
from fewbits.analysis.report.files import replace_folder
from fewbits.analysis.report.study_report import read_study
from fewbits.analysis.report.top import Row, TopRow
from tests.analysis.report.report_inputs import Made, left, parsed, shown_page, simulated
from tests.experiments.data.data_inputs import shared_cache

STUDIES = ("mor", "nvfp4", "gaussws")


# -------------------------------------------------------------------------------- the page


@pytest.mark.parametrize("study", STUDIES)
def test_a_full_page_has_at_most_six_thousand_words_and_shows_all(
    study: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = simulated(study, "cpu", tmp_path, shared_cache(tmp_path_factory))
    report, html = shown_page(study, "cpu", results, monkeypatch)
    assert {*report.verdicts, *report.registry.tables, *report.registry.figures} <= report.shown
    assert len(parsed(html).words.split()) <= 6000
    top = report.top()
    assert 3 <= len(top) <= 7
    assert top["effect"].notna().sum() >= 4
    assert "<b>0</b>" not in html, "no label is shown with the count 0"
    for kind in ("empirical claims", "Arithmetic and definitions", "Our own findings"):
        assert kind in parsed(str(top.report_html)).words


def test_a_page_loads_nothing_and_its_links_lead_to_places(original: Made) -> None:
    page = parsed((original.folder / "index.html").read_text())
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.loaded)
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if not link.startswith("https://"):
            assert link[1:] in page.ids if link.startswith("#") else (original.folder / link).is_file(), link
    assert "decides nothing" in page.words
    assert any(link.endswith("docs/gallery/mor-cpu-full/index.html") for link in page.links)
    tables = {path for path in left(original.folder) if path.startswith("tables/")}
    assert {"mor.ipynb", *tables} <= set(page.links)
    assert {name.partition("/")[0] for name in left(original.folder)} == {
        *("index.html", "mor.ipynb", "results.parquet", "verdicts.json", "tables", "figures")
    }


def test_the_notebook_reads_the_file_beside_it(original: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(original.folder)
    runs = read("results.parquet")
    assert set(runs.trials["state"]) == {"done"}
    assert runs.report.table("Table 2")["ours"].notna().any()
    with pytest.raises(ValueError, match="in the store"):
        _ = runs.metrics


# -------------------------------------------------------------------------------- from the archive


def test_a_report_is_made_again_from_its_archive_without_the_store(original: Made, tmp_path: Path) -> None:
    shutil.copytree(original.folder, tmp_path / "kept")
    away = original.store.rename(tmp_path / "away")
    try:
        words = ["report", "--from", str(tmp_path / "kept" / "results.parquet"), "--out", str(tmp_path / "again")]
        assert cli.main(words) == 0
    finally:
        away.rename(original.store)
    assert left(tmp_path / "again" / "mor-smoke") == left(original.folder)


def test_verdicts_are_those_of_the_store(original: Made) -> None:
    record = json.loads((original.folder / "verdicts.json").read_text())
    verdicts = judge_study("mor", read_study([*original.overrides[:-2], f"runtime.runs={original.store}"]).results)
    assert {name: one["outcome"] for name, one in record["claims"].items()} == {
        name: str(one.outcome) for name, one in verdicts.items()
    }
    assert not any("runtime.runs" in text for text in record["overrides"])


# -------------------------------------------------------------------------------- the headline


def row(name: str, effect: float, half: float | None, words: str = "cost") -> Row:
    interval = None if half is None else Interval(effect - half, effect + half, 0.9)
    finding = Finding(name, Status.UNDECIDED, "", "higher", effect, interval, 6, relative=True)
    return Row(TopRow(f"without {name}", name, words=words), finding, None)


@pytest.mark.parametrize(
    ("effect", "half", "words", "expected"),
    [
        (0.002, 0.0005, "cost", "costs 0.200 % of loss"),
        (-0.002, 0.0005, "cost", "lowers the loss by 0.200 %"),
        (0.0001, 0.0005, "cost", "costs less than 0.060 % of loss, if any"),
        (0.002, None, "cost", "changes the loss by +0.200 % in one seed (no error bar)"),
        (-0.002, 0.0005, "loss", "is 0.200 % lower"),
    ],
)
def test_the_words_follow_from_the_interval(effect: float, half: float | None, words: str, expected: str) -> None:
    assert row("a", effect, half, words).words.replace("\N{NARROW NO-BREAK SPACE}", " ") == expected


# -------------------------------------------------------------------------------- other commands and items


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["study=moar"], ["moar", "mor"]),
        (["study=mor", "scale=huge"], ["huge", "smoke"]),
        (["sweep=partitions"], ["study=mor"]),
        ([], ["study=NAME", "--index"]),
        (["--index"], ["no report in", "fewbits report"]),
        (["study=mor", "--index"], ["--index", "any other option"]),
        (["study=mor", "--sweep", "--from", "x"], ["--from"]),
        (["--from", "x", "--from", "y"], ["need a study"]),
        (["--from", "no-such.parquet"], ["no-such.parquet", "No such file"]),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    words: list[str], named: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["report", *words, "--out", str(tmp_path / "reports")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert all(name in said.err for name in named)
    assert not (tmp_path / "reports").exists()


def test_a_report_that_cannot_be_written_leaves_the_one_before_it(tmp_path: Path) -> None:
    replace_folder(tmp_path / "mor-smoke", lambda: {"index.html": "first"})
    before = left(tmp_path)
    with pytest.raises(OSError, match="deep"):
        replace_folder(tmp_path / "mor-smoke", lambda: {"index.html": "second", "deep/deeper/file": ""})
    assert left(tmp_path) == before


def test_items_have_frames_and_figures_for_jupyter(original: Made) -> None:
    report = read(original.folder / "results.parquet").report
    table, figure, claims = report.table("Table 2"), report.figure("Figure 5"), report.claims("M3")
    assert isinstance(table, pd.DataFrame)
    assert "<table" in str(table._repr_html_())
    assert type(table.dropna(subset=["ours"])) is pd.DataFrame
    assert isinstance(figure, Figure)
    assert {"text/html", "image/png"} <= set(before := figure._repr_mimebundle_())
    figure.axes[0].set_title("changed")
    assert figure._repr_mimebundle_()["image/png"] != before["image/png"], "a changed figure shows its changes"
    assert set(claims["claim"]) == {"M3"}
    for item in (report.table, report.figure, report.claims, report.show):
        with pytest.raises(ValueError, match="Figre 6"):
            item("Figre 6")
