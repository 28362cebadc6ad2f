"""Test that reports' notebooks run in real Jupyter kernels: with papermill, with nbclient, and as percent cells."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import papermill
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from fewbits import cli
from fewbits.analysis.engine.claims.schema import load_claims
from fewbits.analysis.engine.results.paper import paper
from fewbits.analysis.report.notebook import execute
from tests.analysis.report.report_inputs import Made, read_page

NOTEBOOKS = Path(__file__).parents[3] / "analysis" / "studies"
STUDIES = sorted(path.parent.name for path in NOTEBOOKS.glob("*/notebook.py"))
PROBE = """
import json
from matplotlib.figure import Figure
from pandas import DataFrame
items = mor.show("Table 1", "Figure 1")
states = mor.results.trials["state"].tolist()
print(json.dumps([states, isinstance(items[0], DataFrame), isinstance(items[1], Figure)]))
"""


def as_ipynb(study: str, folder: Path) -> Path:
    """Write the study's notebook as an .ipynb file into this folder, and return the file's path."""
    path = folder / f"{study}.ipynb"
    nbformat.write(jupytext.read(NOTEBOOKS / study / "notebook.py"), path)
    return path


def run(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run a notebook in a kernel with this working directory, and return the notebook with its outputs."""
    resources: dict[str, Any] = {"metadata": {"path": str(folder)}}
    ran: NotebookNode = NotebookClient(notebook, timeout=300, resources=resources).execute()
    return ran


def printed(cell: NotebookNode) -> list[Any]:
    (stream,) = [output for output in cell.outputs if output.output_type == "stream" and output.name == "stdout"]
    values: list[Any] = json.loads(stream.text)
    return values


def test_a_reports_notebook_finds_its_store_where_it_lies(original: Made) -> None:
    notebook = nbformat.read(original.folder / "mor.ipynb", as_version=4)
    (tagged,) = (i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    cells = [cell.source.replace("mor.opening()", "") for cell in notebook.cells[: tagged + 2]]
    kept = [new_code_cell(source) for source in (*cells, PROBE, "items", "items[1]")]
    *_, probe, items, figure = run(new_notebook(cells=kept), original.folder).cells
    assert printed(probe) == [["done"] * 6 + ["diverged"] * 2, True, True]
    table_shown, figure_shown = items.outputs
    assert 'class="fewbits"' in table_shown.data["text/html"]
    assert "<table" in table_shown.data["text/html"]
    assert {"image/png", "text/html"} <= set(figure_shown.data)
    (alone,) = figure.outputs
    assert alone.data["image/png"].startswith("iVBOR"), "base64 of a PNG"
    assert paper("mor").figure("Figure 1").caption[:20] in alone.data["text/html"]


@pytest.mark.deep  # the test above also runs cells in a kernel and finds the store
def test_a_notebooks_source_runs_as_percent_cells_and_finds_the_store_above(original: Made, tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(original.store, tmp_path / "runs")
    source = (NOTEBOOKS / "mor" / "notebook.py").read_text()
    cells = [cell.partition("\n")[2] for cell in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]]
    code = [cell for cell in cells if cell.strip() and not cell.startswith("#")][:3]
    assert [len(re.findall(r"^study|^from|^mor", cell, re.MULTILINE)) > 0 for cell in code] == [True] * 3
    code[1] = code[1].replace('"mor"', repr(str(original.file)), 1).replace('"smoke"', '""', 1)  # edited by the user
    code[2] = code[2].replace("mor.opening()", "")
    ran = run(new_notebook(cells=[new_code_cell(cell) for cell in (*code, PROBE)]), tmp_path / "notebooks")
    assert printed(ran.cells[-1])[0] == ["done"] * 6 + ["diverged"] * 2


def test_mors_own_notebook_shows_all_that_is_registered_and_runs_over_an_empty_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    words = ["report", "study=mor", "scale=smoke", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 1
    assert "places without a result" in capsys.readouterr().err
    page = read_page(tmp_path / "out" / "mor-smoke" / "index.html")
    assert "does not make this item yet" not in page.words
    claims = [place for place in page.ids if re.fullmatch(r"[MFP]\d+", place)]
    assert set(claims) == {claim.id for claim in load_claims("mor").claims}
    assert list((tmp_path / "runs").iterdir()) == [], "a report writes nothing into the store"


@pytest.mark.deep  # the tests above also run this notebook and cells in a kernel
def test_papermill_runs_a_notebook_with_parameters(tmp_path: Path) -> None:
    made = tmp_path / "made.ipynb"
    words = ["-p", "study", "mor", "-p", "scale", "smoke", "-p", "runs", str(tmp_path / "runs"), "--no-progress-bar"]
    command = [sys.executable, "-m", "papermill", str(as_ipynb("mor", tmp_path)), str(made), *words]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr[-2000:]
    notebook = nbformat.read(made, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    shown = [cell for cell in notebook.cells if cell.cell_type == "code" and re.match(r"mor\.\w+\(", cell.source)]
    assert shown
    assert all(output.data.keys() & {"text/html"} for cell in shown for output in cell.outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= len(paper("mor").figures)


@pytest.mark.parametrize("study", STUDIES)
def test_papermill_lists_the_parameters_with_their_help(study: str, tmp_path: Path) -> None:
    parameters = papermill.inspect_notebook(str(as_ipynb(study, tmp_path)))
    assert {name: entry["inferred_type_name"] for name, entry in parameters.items()} == {
        "study": "str",
        "scale": "str",
        "runs": "str",
        "overrides": "str",
    }
    assert all(entry["help"] for entry in parameters.values())
    assert parameters["study"]["default"] == f'"{study}"'


@pytest.mark.deep
@pytest.mark.parametrize("study", STUDIES)
def test_each_notebook_runs_whole_in_a_kernel(study: str, tmp_path: Path) -> None:
    ran = run(nbformat.read(as_ipynb(study, tmp_path), as_version=4), tmp_path)
    assert not [output for cell in ran.cells for output in cell.get("outputs", []) if output.output_type == "error"]


def test_parameters_replace_values_and_keep_comments(tmp_path: Path) -> None:
    source = tmp_path / "notebook.py"
    source.write_text('# %% tags=["parameters"]\na: str = "x"  # about a\nb = 1\n\n# %%\nprint(a, b)\n')
    executed = execute(source, {"a": "it's", "b": [2]})
    assert executed.notebook.cells[0].source == 'a: str = "it\'s"  # about a\nb = [2]'
    assert executed.notebook.cells[1].outputs[0].text == "it's [2]\n"
    for wrong in ({"a": ""}, {"a": "", "c": 1}):
        with pytest.raises(ValueError, match="must set"):
            execute(source, wrong)
