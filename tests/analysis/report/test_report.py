"""Test reports: the page loads no other file, numbers link to their trials, and equal results give equal bytes."""

import csv
import html
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from fewbits import cli
from fewbits.analysis.engine.claims.findings import Outcome
from fewbits.analysis.engine.claims.judging import judge_study
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.report.files import replace_folder
from fewbits.analysis.report.index import restored
from fewbits.analysis.report.items import TableResult, Value
from fewbits.analysis.report.registry import study_registry
from fewbits.analysis.report.study_report import read_study
from fewbits.analysis.views.provenance import Provenance
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.planning import store
from tests.analysis.report.report_inputs import Made, left, read_page, stand_in


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


@pytest.fixture
def made(original: Made, tmp_path: Path) -> Made:
    """Return a copy of the store that a test may change, with a new folder for reports."""
    shutil.copytree(original.store, tmp_path / "runs")
    return Made(original.file, tmp_path / "runs", tmp_path / "reports")


def test_the_page_needs_nothing_beside_it(original: Made) -> None:
    page = original.page
    assert page.loaded
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.loaded)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "url(" not in page.styles
    assert "@import" not in page.styles
    assert "prefers-color-scheme: dark" in page.styles


def test_markup_in_names_notes_and_failures_is_text(made: Made, tmp_path: Path) -> None:
    """Check that HTML in texts of the user is escaped, so that it cannot run scripts on the page.

    The HTML is in an arm's and a sweep's `about`, in overrides, and in the reason and log of a failed trial.
    """
    attack = "</td></details></style>\"'><script>alert('{}')</script><img src=x onerror=alert(1)>"
    data = yaml.safe_load(made.file.read_text())
    data |= {"about": attack.format("about"), "zipped": [{"extra": {attack.format("axis"): ["training.steps=4"]}}]}
    data["arms"][attack.format("arm")] = {
        "overrides": ["recipe=bf16"],
        "axes": [],
        "about": attack.format("arm's about"),
    }
    (tmp_path / "attack.yaml").write_text(yaml.safe_dump(data))
    changed = Made(tmp_path / "attack.yaml", made.store, made.reports)
    failed = next(made.store.glob("*-bf16-*-s1-*"))
    (failed / "result.json").unlink()
    reason = attack.format("reason")
    store.write_failure(RunFolder(failed, ""), store.Failure(reason, False, 1, [attack.format("log")]))
    assert changed.report() == 1
    page = changed.page
    for said in ("arm", "reason"):
        assert attack.format(said) in page.words
    assert "script" not in page.tags
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.loaded)
    for drawing in (changed.folder / "figures").glob("*.svg"):
        assert "<script" not in drawing.read_text()
    assert cli.main(["report", "--index", "--out", str(made.reports)]) == 0
    assert "script" not in read_page(made.reports / "index.html").tags


def test_links_lead_somewhere(original: Made) -> None:
    page = original.page
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        elif not link.startswith("https://arxiv.org/"):
            assert (original.folder / link).is_file()


def test_equal_results_give_equal_bytes(original: Made, tmp_path: Path) -> None:
    assert original.report(reports=tmp_path / "again") == 0
    assert left(tmp_path / "again" / "mor-smoke") == left(original.folder)


def test_a_store_is_named_as_one_types_it(made: Made) -> None:
    results = read_study(["study=mor", "scale=smoke"]).results
    page = Provenance(results, ["study=mor", 'runtime.runs="/tmp/two words"']).table()
    assert html.unescape(page).count("--runs '/tmp/two words'") == 2


def test_a_report_is_made_again_if_it_is_damaged_or_timings_were_measured_meanwhile(made: Made) -> None:
    """Check that equal results make no new report, and that the times that trials took change no byte of it."""
    assert made.report() == 0
    index = made.folder / "index.html"
    first, before = index.stat().st_mtime_ns, left(made.folder)
    assert made.report() == 0
    assert index.stat().st_mtime_ns == first
    for path in made.store.glob("*/timing.parquet"):
        table = pd.read_parquet(path)
        table.assign(seconds=10 * table["seconds"]).to_parquet(path)
    index.write_text("half")
    assert made.report() == 0
    assert left(made.folder) == before
    (made.store / "bench").mkdir()
    (made.store / "bench" / "generators-cpu.json").write_text("{}")
    assert made.report() == 0
    assert left(made.folder)["made-of.json"] != before["made-of.json"]


def test_what_is_missing_is_trained_first_where_one_asks(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    gone = next(made.store.glob("*-bf16-*-s1-*"))
    shutil.rmtree(gone)
    assert made.report() == 1
    words = ["report", str(made.file), "--runs", str(made.store), "--out", str(made.reports), "--sweep"]
    assert cli.main([*words, "--backend", "local"]) == 0
    assert (gone / "result.json").is_file()
    assert capsys.readouterr().out.endswith(f"{made.folder / 'index.html'}\n")
    assert cli.main([*words, "--index"]) == 2


def test_everything_registered_is_shown_once_in_the_papers_order(original: Made) -> None:
    ids = original.page.ids
    own = paper("mor")
    for names in ([t.id for t in own.tables], [f.id for f in own.figures]):
        places = [ids.index(name.lower().replace(" ", "-")) for name in names]
        assert places == sorted(places)
    claims = [place for place in ids if place in ("M1", "M3", "M4", "M10", "own-1")]
    assert claims == ["M1", "M3", "M4", "M10", "own-1"]
    assert ids.count("settings") == 1


def test_the_verdicts_are_those_of_the_registry(original: Made) -> None:
    record = json.loads((original.folder / "verdicts.json").read_text())
    results = read_study([str(original.file), f"runtime.runs={original.store}"]).results
    verdicts = judge_study("mor", results)
    assert list(record["claims"]) == list(verdicts)
    for name, verdict in verdicts.items():
        found = record["claims"][name]
        assert found["outcome"] == verdict.outcome
        assert [one["effect"] for one in found["findings"]] == [one.effect for one in verdict.findings]
        assert [one["name"] for one in found["findings"]] == [one.name for one in verdict.findings]
        assert found["claim"]["statement"] in original.page.words
        assert restored(found) == verdict
    assert record["flags"] == []
    assert {"✓ reproduced", "? cannot tell", "– not testable here", "· not run"} <= set(
        re.findall(r"[✓✗?–·] [a-z ]*[a-z]", original.page.words)
    )


def test_what_a_scale_does_not_run_is_listed_by_id_and_folded(original: Made) -> None:
    record = json.loads((original.folder / "verdicts.json").read_text())
    text = (original.folder / "index.html").read_text()
    outcomes = {name: found["outcome"] for name, found in record["claims"].items()}
    not_run = {name for name, outcome in outcomes.items() if outcome == Outcome.NOT_RUN}
    assert not_run
    rows = set(re.findall(r'<tr><th scope="row"><a href="#(\w[^"]*)"><b>', text))
    assert rows == set(outcomes) - not_run
    for name in outcomes:
        card = text.split(f'id="{name}">', 1)[1].split("</section>", 1)[0]
        said = re.sub(r"<details>.*?</details>", "", card, flags=re.DOTALL)
        assert ("We test: " in card and "We test: " not in said) == (name in not_run and "We test: " in card)
        assert f'href="#{name}"' in text


def test_a_number_leads_to_its_trials(original: Made) -> None:
    results = read_study([str(original.file), f"runtime.runs={original.store}"]).results
    page = original.page
    made = study_registry("mor").tables[0].make(results)
    assert isinstance(made, TableResult)
    assert made.trials
    for key in made.trials:
        folder = Path(results.trials.set_index("id")["folder"][[key]].iloc[0]).name
        assert f"#trial-{key[:8]}" in page.links
        assert f"trial-{key[:8]}" in page.ids
        assert folder in page.words
        assert any(folder in title for title in page.titles)


def test_tables_are_csv_and_latex(original: Made) -> None:
    results = read_study([str(original.file), f"runtime.runs={original.store}"]).results
    made = study_registry("mor").tables[0].make(results)
    assert isinstance(made, TableResult)
    with (original.folder / "tables" / "table-4.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(dict.fromkeys(row["metric"] for row in rows)) == ["Validation loss", "MMLU & more"]
    ours = made.rows[0].cells[0].ours
    assert isinstance(ours, Value)
    assert (rows[0]["column"], float(rows[0]["ours"])) == ("BF16", ours.mean)
    latex = (original.folder / "tables" / "table-4.tex").read_text()
    lines = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {4}
    assert r"MMLU \& more (\%)" in latex
    assert latex.count(r"\begin{") == latex.count(r"\end{") == 2
    assert latex.isascii() or set(re.findall(r"[^\x00-\x7f]", latex)) <= {"–"}


def test_figures_are_files_in_both_themes(original: Made) -> None:
    folder = original.folder / "figures"
    assert {path.name for path in folder.iterdir()} == {"figure-10.svg", "figure-10-dark.svg", "figure-10.png"}
    assert (folder / "figure-10.svg").read_text() != (folder / "figure-10-dark.svg").read_text()
    assert (folder / "figure-10.png").read_bytes().startswith(b"\x89PNG")


def test_the_notebook_beside_the_page_is_one(original: Made) -> None:
    import nbformat

    notebook = nbformat.read(original.folder / "mor.ipynb", as_version=4)
    nbformat.validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert any("Table 2" in cell.source for cell in notebook.cells)
    (set_in,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    values: dict[str, object] = {}
    exec(set_in.source, values)
    assert [values[name] for name in ("study", "scale", "overrides")] == [str(original.file), "", ""]
    assert values["runs"] == str(original.store)


def test_a_deleted_trial_is_said_to_be_missing(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    gone = next(path for path in sorted(made.store.iterdir()) if "mor-tensor" in path.name)
    shutil.rmtree(gone)
    assert made.report() == 1
    said = capsys.readouterr()
    assert said.err.startswith("fewbits: 1 place without a result")
    assert said.out.splitlines()[-1] == str(made.folder / "index.html")
    assert "⚠ 1 place of 8 without a result" in made.page.words
    assert "seed 0: missing: not run yet, or not finished" in made.page.words
    record = json.loads((made.folder / "verdicts.json").read_text())
    assert len(record["flags"]) == 1


@pytest.fixture
def edited_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fewbits.experiments.identity.numerics", lambda: {"numerics": 9})


@pytest.mark.usefixtures("edited_kernel")
def test_results_of_other_code_are_shown_and_said_to_be_so(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    path = sorted(made.store.glob("*/provenance.json"))[0]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"git": "f" * 40}))
    assert made.report() == 0
    words = made.page.words
    assert "⚠ 8 of 8 trials were computed by code that differs from today's (commits " in words
    assert "f" * 10 in words
    assert "all results were computed in the same way" not in words
    assert "without a result" not in words
    record = json.loads((made.folder / "verdicts.json").read_text())
    assert record["flags"] == []
    assert len(record["notices"]) == 1
    capsys.readouterr()
    assert cli.main(["claims", *made.overrides]) == 0
    assert "8 of 8 trials were computed by code that differs" in capsys.readouterr().out


@pytest.mark.usefixtures("edited_kernel")
def test_what_is_planned_with_an_edited_kernel_takes_no_result_of_the_kernel_before(made: Made) -> None:
    """Check that a report with new overrides does not use results that were computed before a kernel was edited.

    No stored plan has the overrides, so the report makes a new plan, in which these results have no place.
    """
    assert made.report("seeds=[1,0]") == 1
    words = made.page.words
    assert "⚠ 8 places of 8 without a result" in words
    assert "no data" in words


def test_an_edited_sweep_is_reported_as_it_ran_and_what_was_not_made_alike_is_said(made: Made) -> None:
    made.file.write_text(made.file.read_text().replace("seeds: [0, 1]", "seeds: [0, 1, 2]"))
    path = sorted(made.store.glob("*/provenance.json"))[0]
    provenance = json.loads(path.read_text())
    for segment in provenance["segments"]:
        segment["environment"]["kind"] = "another"
    path.write_text(json.dumps(provenance | {"git": "f" * 40}))
    assert made.report() == 0
    assert "without a result" not in made.page.words
    assert "2 commits: " in made.page.words
    assert "2 kinds of machine within seed" in made.page.words


def test_the_index_says_what_the_reports_say_and_leads_to_them(original: Made, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    shutil.copytree(original.folder, reports / original.folder.name)
    shutil.copytree(original.folder, reports / "mor-cpu")
    other = reports / "mor-cpu" / "verdicts.json"
    record = json.loads(other.read_text())
    record["scale"], record["flags"] = "cpu", ["bf16, seed 0: missing"]
    first, *_, last = record["claims"]
    record["claims"][first] |= {"outcome": "not reproduced"}
    del record["claims"][last]
    other.write_text(json.dumps(record))
    assert cli.main(["report", "--index", "--out", str(reports)]) == 0
    page = read_page(reports / "index.html")
    assert not page.loaded
    assert "1 warning" in page.words
    verdicts = judge_study("mor", read_study([str(original.file), f"runtime.runs={original.store}"]).results)
    html = (reports / "index.html").read_text()
    rows = {row[: row.index("</b>")]: row for row in html.split('<th scope="row"><b>')[1:]}
    assert set(rows) == set(verdicts)
    for name, verdict in verdicts.items():
        assert str(verdict.outcome) in rows[name]
    assert "not reproduced" in rows[first]
    for folder in (original.folder.name, "mor-cpu"):
        assert f"{folder}/index.html" in page.links
        assert f"{folder}/index.html#{first}" in page.links
    assert f"mor-cpu/index.html#{last}" not in page.links
    other.write_text("{")
    assert cli.main(["report", "--index", "--out", str(reports)]) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["study=moar"], ["moar", "mor"]),
        (["study=mor", "scale=huge"], ["huge", "smoke"]),
        (["sweep=partitions"], ["study=mor"]),
        ([], ["study=NAME", "--index"]),
        (["--index"], ["no report in", "fewbits report"]),
        (["study=mor", "--index"], ["--index", "any other option"]),
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


def test_what_is_no_report_is_not_replaced(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    (made.folder).mkdir(parents=True)
    (made.folder / "thesis.txt").write_text("years")
    assert made.report() == 2
    assert "is no report" in capsys.readouterr().err
    assert (made.folder / "thesis.txt").read_text() == "years"


def test_a_report_that_cannot_be_written_leaves_the_one_before_it(tmp_path: Path) -> None:
    folder = tmp_path / "mor-smoke"
    replace_folder(folder, lambda: {"index.html": "first"}, "a")
    before = left(tmp_path)
    with pytest.raises(OSError, match="deep"):
        replace_folder(folder, lambda: {"index.html": "second", "deep/deeper/file": ""}, "b")
    assert left(tmp_path) == before


def test_a_place_that_takes_no_report_is_found_before_one_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years")
    for folder, said in ((tmp_path / "file" / "mor-smoke", "--out .*file: "), (tmp_path / "thesis", "no report")):
        with pytest.raises(ValueError, match=said):
            replace_folder(folder, lambda: pytest.fail("the report was made before its folder was checked"), "a")


def test_claims_are_listed_in_the_terminal_as_in_the_report(original: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["claims", *original.overrides]) == 0
    lines = capsys.readouterr().out.splitlines()
    column = lines[0].index("verdict")
    listed = {line.split()[0]: line[column:] for line in lines[1:] if line.startswith(("M", "own"))}
    assert list(listed) == ["M1", "M3", "M4", "M10", "own-1"]
    assert listed["M1"].startswith("reproduced")
    assert listed["M10"].startswith("not run")
    assert sum("because: " in line for line in lines) == 4
    assert "arithmetic and definitions: 1 reproduced" in lines[-1]
    assert cli.main(["claims", *original.overrides, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((original.folder / "verdicts.json").read_text())


def test_items_have_frames_and_figures_for_jupyter(original: Made) -> None:
    report = read_study([str(original.file), f"runtime.runs={original.store}"])
    table, figure, claims = report.table("Table 4"), report.figure("Figure 10"), report.claims("M3")
    assert isinstance(table, pd.DataFrame)
    assert list(table["metric"].unique()) == ["Validation loss", "MMLU & more"]
    assert "<table" in str(table._repr_html_())
    assert type(table.dropna(subset=["ours"])) is pd.DataFrame
    assert isinstance(figure, Figure)
    assert not figure.missing
    assert {"text/html", "image/png"} <= set(figure._repr_mimebundle_())
    assert list(claims["claim"]) == ["M3", "M3"]
    missing = report.figure("Figure 6")
    assert "not run at this scale" in missing.missing
    assert "not run at this scale" in missing._repr_mimebundle_()["text/html"]
    for item in (report.table, report.figure, report.claims, report.show):
        with pytest.raises(ValueError, match="Figre 6"):
            item("Figre 6")


def test_a_changed_figure_shows_its_changes(original: Made) -> None:
    figure = read_study([str(original.file), f"runtime.runs={original.store}"]).figure("Figure 10")
    before = figure._repr_mimebundle_()
    figure.axes[0].set_title("changed")
    after = figure._repr_mimebundle_()
    assert before["image/png"] != after["image/png"]
    assert before["text/html"] != after["text/html"]


def test_claims_are_grouped_by_kind_with_sizes_beside_the_tally(original: Made) -> None:
    words = original.page.words
    assert [
        words.index(title)
        for title in ("The paper's empirical claims", "Arithmetic and definitions", "Our own findings")
    ] == sorted(
        words.index(title)
        for title in ("The paper's empirical claims", "Arithmetic and definitions", "Our own findings")
    )
    assert re.search(r"parameters, .* tokens; up to \d+% of a quantized run's tokens in its own recipe", words)
