"""Test that commands give the same output for a store on another machine.

That machine lacks the training data, has another version of torch, and has the store at another path.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from fewbits import cli
from tests.analysis.conftest import SWEEP
from tests.analysis.report.report_inputs import left
from tests.experiments.data.data_inputs import bin_folder
from tests.forked_python import run_python

ROOT = Path(__file__).parents[2]
THERE = """
import contextlib, io, json, sys
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.99.0+elsewhere")
from fewbits import cli

answers = []
for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(argv)
    answers.append([status, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""
Answer = tuple[int, str, str]  # exit status, stdout, stderr


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokens = np.random.default_rng(0).integers(0, 256, 40_000)
    return bin_folder(tmp_path_factory.mktemp("tokens") / "data", tokens.tolist(), tokens[:4_000].tolist())


@pytest.fixture(scope="module")
def swept(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return (the sweep's file, its store), after the whole sweep has run."""
    folder = tmp_path_factory.mktemp("swept")
    words = [f"data.path={data}", f"runtime.cache={folder / 'cache'}", "runtime.device=cpu"]
    text = SWEEP.replace("overrides:", "overrides:" + "".join(f"\n  - {word}" for word in words), 1)
    text = text.replace("data=synthetic", "data=bin").replace("  - data.size=65536\n", "")
    text = text.replace("seeds: [0, 1]", "seeds: [0]")
    (folder / "tiny.yaml").write_text("study: mor\n" + text)
    assert cli.main(["sweep", str(folder / "tiny.yaml"), "--runs", str(folder / "runs"), "--backend", "local"]) == 0
    return folder / "tiny.yaml", folder / "runs"


def commands(file: Path, runs: Path, reports: Path) -> dict[str, list[str]]:
    trial = next(path.name for path in sorted(runs.glob("*-mor-tensor-*")))
    words = [str(file), "--runs", str(runs)]
    return {
        "status": ["status", *words, "--json"],
        "claims": ["claims", *words, "--json"],
        "report": ["report", *words, "--out", str(reports)],
        "explain": ["explain", trial, "--runs", str(runs)],
    }


def test_another_machine_says_the_same_without_data(
    swept: tuple[Path, Path],
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    file, runs = swept
    reports = {place: tmp_path / "reports" / place for place in ("here", "there")}
    asked, here = commands(file, runs, reports["here"]), []
    for argv in asked.values():
        capsys.readouterr()
        status, shown = cli.main(argv), capsys.readouterr()
        here.append((status, shown.out, shown.err))
    moved = tmp_path / "elsewhere" / "store"
    shutil.copytree(runs, moved)
    gone = data.rename(data.with_name("gone"))
    shutil.rmtree(file.with_name("cache"), ignore_errors=True)  # the other machine has no cache of data, either
    try:
        unstored = ["status", str(file), "--runs", str(moved), "optimizer.lr=0.01"]
        *there, last = elsewhere([*commands(file, moved, reports["there"]).values(), unstored], tmp_path / "work")
    finally:
        gone.rename(data)
    for name, one, other in zip(asked, here, there, strict=True):
        assert (one[0], one[2]) == (other[0], other[2]) == (0, ""), name
        said, expected = (
            text.replace(str(store), "").replace(str(folder), "")
            for text, store, folder in ((other[1], moved, reports["there"]), (one[1], runs, reports["here"]))
        )
        assert said == expected, name
    assert_equal_reports(reports["here"] / "mor-smoke", reports["there"] / "mor-smoke", runs, moved)
    assert last[0] == 2, "no stored plan has these overrides, and a new plan needs the data"
    assert "no folder" in last[2]


def elsewhere(commands: list[list[str]], folder: Path) -> list[Answer]:
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}  # the same installation, since its kernels are compiled
    done = run_python(["-c", THERE], folder=folder, environment=environment, stdin=json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return [(status, out, err) for status, out, err in json.loads(done.stdout.splitlines()[-1])]


def assert_equal_reports(a: Path, b: Path, runs: Path, moved: Path) -> None:
    """Assert that all files of two reports are equal, except the paths of the stores in the files.

    a, b: the folders of the reports. runs, moved: the store of each.
    """
    here, there = left(a), left(b)
    assert here.keys() == there.keys()
    for name in here:
        one, other = here[name].replace(str(runs).encode(), b""), there[name].replace(str(moved).encode(), b"")
        assert one == other, name
