"""Test that the scripts in examples/ run unchanged."""

import math
import os
import re
import runpy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import fewbits
from fewbits.sweeps.planning.store import State
from tests.forked_python import run_python

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *words: str) -> Any:
    """Run examples/NAME.py's function `main` with these arguments in this process, and return its result."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*words)


@pytest.mark.parametrize("recipe", ["mor/block", "gaussws"])
def test_a_model_of_ones_own_trains_on_a_text_file(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    loss = run("own_model", str(EXAMPLES / "README.md"), recipe)
    assert loss < math.log(256), "worse than guessing bytes"
    assert capsys.readouterr().out.count("loss") == 20


def test_a_hugging_face_model_trains_and_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    loss = run("hugging_face")
    assert loss < math.log(256)
    out = capsys.readouterr().out
    assert "model.layers.2.mlp.up_proj and 1 more (kept)" in out
    again = float(out.rstrip().rpartition(" ")[2])
    assert again < math.log(256)


@pytest.mark.deep
def test_the_notebook_for_visitors_runs_without_the_repository(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "fewbits.ipynb", 4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5
    assert list(tmp_path.iterdir()) == []


def test_kernels_are_used_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run("kernels")
    out = capsys.readouterr().out
    stochastic, nearest = map(float, re.findall(r"(?:stochastic|nearest) ([\d.]+)", out))
    assert stochastic < nearest / 2
    assert "4.50 bits" in out


def test_scaled_losses_keep_small_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    run("loss_scaling")
    rows = re.findall(r"loss ([\d.]+), zero gradients ([\d.]+)%", capsys.readouterr().out)
    (_, kept), _, (_, flushed) = rows
    assert float(kept) < float(flushed) / 2


def test_sums_of_few_bits_err_and_promoted_ones_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    run("casts_and_sums")
    errors = dict(re.findall(r"products, (\S+) +largest error ([\d.]+)%", capsys.readouterr().out))
    assert float(errors["hopper-fp8"]) > 1 > 10 * float(errors["hopper-fp8-promoted"])


def test_a_recipe_is_swept_compared_in_mlflow_and_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """own_recipe.py trains and compares runs, and then own_claim.py checks two claims about these runs.

    The first script runs in its own process, since it sets MLflow's tracking URI.
    """
    arguments = [str(EXAMPLES / "own_recipe.py"), str(tmp_path / "runs")]
    compared = run_python(arguments, folder=tmp_path, environment=os.environ)
    assert compared.returncode == 0, compared.stderr[-2000:]
    rows = re.findall(r"^ *(0\.0001|0\.02|0\.03) +3\.0 +(\d\.\d+)$", compared.stdout, re.MULTILINE)
    assert len(set(rows)) == 3, compared.stdout
    runs = fewbits.runs(tmp_path / "runs")
    assert set(runs.trials["state"]) == {State.DONE}
    assert len(runs.trials) == 15
    run("own_claim", str(tmp_path / "runs"))
    judged = capsys.readouterr().out
    assert len(re.findall(r"^ *(same-loss|lower-loss) +(reproduced|not reproduced|cannot tell)", judged, re.M)) == 2
