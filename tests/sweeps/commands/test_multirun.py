"""Test `fewbits train --multirun`: trials of Hydra's grid run once, failures are named, wrong input gives one line."""

from pathlib import Path

import pytest

from fewbits import cli
from fewbits.sweeps.commands.multirun import cells
from tests.experiments.trial_inputs import MOR
from tests.sweeps.sweep_inputs import tiny

LOCAL = ("--backend", "local")


def multirun(cache: Path, runs: Path, *more: str) -> int:
    overrides = tiny(cache, "training.steps=2", f"runtime.runs={runs}", *more)
    return cli.main(["train", "--multirun", *overrides, *LOCAL])


def results(runs: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in runs.glob("*/result.json")}


def test_a_grid_is_run_once(cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    grid = (*MOR, "recipe.threshold=0.03,0.045", "seed=range(2)", "hydra/sweeper=basic")
    assert multirun(cache, tmp_path / "runs", *grid) == 0
    shown = capfd.readouterr()
    assert "4 trials: 4 done\n" in shown.out
    assert "viewStateShareKey=fewbits-multirun-smoke" in shown.out
    assert "MLflow was not updated" not in shown.err
    first = results(tmp_path / "runs")
    assert len(first) == 4
    assert multirun(cache, tmp_path / "runs", *grid) == 0
    assert results(tmp_path / "runs") == first
    assert cli.main(["train", *tiny(cache, "training.steps=2", f"runtime.runs={tmp_path / 'runs'}"), *grid[:2]]) == 0
    assert results(tmp_path / "runs") == first  # 0.045 and seed 0 are the defaults
    assert not (Path.cwd() / "multirun").exists()
    assert not (Path.cwd() / "outputs").exists()


def test_what_is_swept_are_the_keys_that_vary() -> None:
    jobs = [["a=1", "seed=0", "b=x"], ["a=2", "seed=0", "b=x"], ["a=1", "seed=1", "b=x"]]
    found = cells(jobs)
    assert [cell.axes for cell in found] == [(("a", "1"),), (("a", "2"),), (("a", "1"),)]
    assert [cell.seed for cell in found] == [0, 0, 1]
    assert [list(cell.overrides) for cell in found] == jobs


def test_a_failure_is_status_1(cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file in place of the checkpoints' folder makes one trial fail; the other one is unaffected."""
    assert multirun(cache, tmp_path / "runs", "seed=0,1") == 0
    for folder in list((tmp_path / "runs").glob("*-s1-*")):
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (folder / "checkpoints").write_text("no folder")
    assert multirun(cache, tmp_path / "runs", "seed=0,1") == 1
    shown = capfd.readouterr()
    assert "2 trials: 1 done, 1 failed\n" in shown.out
    assert "failed: " in shown.err
    assert "Error executing job" not in shown.err  # Hydra's line
    assert "Traceback (most recent call last):\n  File" not in shown.err.partition("failed: ")[0]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("recipe.treshold=0.1,0.2", "recipe.treshold"),
        ("recipe=mor/blok,bf16", "no recipe 'mor/blok'"),
        ("training.steps=1,-1", "training.steps -1: 1 or more is expected"),
        ("nonsense", "is not KEY=VALUE"),
        ("hydra/sweeper=none", "other sweepers are separate packages: pip install hydra-none-sweeper"),
        ("--address=http://head:8265", "--address http://head:8265 is a Ray dashboard"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    word: str, message: str, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert multirun(cache, tmp_path / "runs", *MOR, word) == 2
    shown = capfd.readouterr()
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("fewbits: ")
    assert message in shown.err
    assert shown.out == ""
    assert not list(tmp_path.glob("runs/nemotron*"))
