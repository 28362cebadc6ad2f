"""Test `fewbits train --multirun`: each trial of a grid is trained once, failures are named, errors are one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fewbits import cli
from fewbits.sweeps.planning.sweep import cells_of_jobs, fixed_keys
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
    assert "http://" not in shown.out  # no link is printed, since no MLflow server answers
    assert "`fewbits ui" in shown.out
    assert "MLflow was not updated" not in shown.err
    first = results(tmp_path / "runs")
    assert len(first) == 4
    assert multirun(cache, tmp_path / "runs", *grid) == 0
    assert results(tmp_path / "runs") == first
    assert cli.main(["train", *tiny(cache, "training.steps=2", f"runtime.runs={tmp_path / 'runs'}"), *grid[:2]]) == 0
    assert results(tmp_path / "runs") == first  # the trial of the default threshold 0.045 and seed 0 was in the grid
    assert not (Path.cwd() / "multirun").exists()
    assert not (Path.cwd() / "outputs").exists()


def test_the_axes_are_the_keys_of_overrides_with_several_values() -> None:
    """Axes are found from the command's overrides, since a sweeper may launch jobs one by one, each with one value."""
    fixed = fixed_keys(["a=1,2", "seed=0,1", "b=x", "c=interval(0,1)", "+d=[1,2]"])
    assert fixed == {"b", "d"}
    (cell,) = cells_of_jobs("mine", [["a=1", "seed=1", "b=x", "c=0.5", "+d=[1,2]"]], fixed)
    assert cell.axes == (("a", "1"), ("c", "0.5"))
    assert cell.seed == 1
    assert cell.overrides == ("a=1", "seed=1", "b=x", "c=0.5", "+d=[1,2]")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("recipe.treshold=0.1,0.2", "recipe.treshold"),
        ("recipe=mor/blok,bf16", "no recipe 'mor/blok'"),
        ("training.steps=1,-1", "training.steps -1: 1 or more is expected"),
        ("hydra/launcher=basic", "runtime.runs=DIR"),
        ("hydra.sweep.dir=elsewhere", "runtime.runs=DIR"),
        ("--cfg=job", "leave out --multirun"),
        ("hydra.job.name=a/b", "'a/b'"),
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


# -------------------------------------------------------------------------------- sweepers and names


def listed(runs: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """Return the rows that `fewbits status --json` prints for these arguments and the store `runs`."""
    capsys.readouterr()
    assert cli.main(["status", *arguments, "--runs", str(runs), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def losses(runs: Path, rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        row["folder"]: json.loads((runs / row["folder"] / "result.json").read_text())["validation_loss"] for row in rows
    }


OPTUNA = (
    "hydra/sweeper=optuna",
    "optimizer.lr=tag(log,interval(1e-4,1e-1))",
    "hydra.sweeper.n_jobs=1",
    "hydra.sweeper.sampler.seed=1",
    "hydra.sweeper.n_trials=2",
)


def test_optuna_keeps_every_trial_and_gets_its_validation_loss(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Optuna launches trials one by one; all of them are in one sweep, and the repeated command trains none again."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper.optuna_sweeper")
    runs = tmp_path / "runs"
    assert multirun(cache, runs, *OPTUNA, "hydra.job.name=rates") == 0
    assert "2 trials: 2 done" in capsys.readouterr().out
    rows = listed(runs, capsys, "rates")
    assert len({row["place"]["optimizer.lr"] for row in rows}) == 2
    best = yaml.safe_load(next(runs.glob("plans/multirun/rates/optimization_results.yaml")).read_text())
    assert best["best_value"] == min(losses(runs, rows).values())
    first = results(runs)
    assert multirun(cache, runs, *OPTUNA, "hydra.job.name=rates") == 0
    assert results(runs) == first
    assert multirun(cache, runs, *OPTUNA, "hydra.sweeper.sampler.seed=2", "hydra.job.name=rates") == 0
    assert len(listed(runs, capsys, "rates")) > 2  # the new trials are added to the earlier ones


def test_a_multirun_over_ones_own_configs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A multirun can use configs of the user: in a folder, by the path of a file, and by a group `+experiment=NAME`."""
    monkeypatch.chdir(tmp_path)
    recipe = "defaults: [mxfp8, _self_]\nkeep: {first: 0, last: 1}\n"
    experiment = "# @package _global_\ndefaults: [{override /recipe: one}]\noptimizer: {lr: 0.5}\n"
    for name, text in (
        ("mine/recipe/one.yaml", recipe),
        ("mine/recipe/block/none.yaml", recipe),
        ("two.yaml", recipe.replace("0, last: 1", "1, last: 0")),
        ("mine/experiment/both.yaml", experiment),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    runs = tmp_path / "runs"
    assert multirun(cache, runs, "recipe=bf16,one,./two.yaml", "--config-dir", "mine", "hydra.job.name=grid") == 0
    rows = listed(runs, capsys, "grid")
    assert [row["place"]["recipe"] for row in rows] == ["bf16", "one", "./two.yaml"]
    kept = [yaml.safe_load((runs / row["folder"] / "config.yaml").read_text())["recipe"]["keep"] for row in rows]
    assert [(keep["first"], keep["last"]) for keep in kept] == [(0, 0), (0, 1), (1, 0)]
    assert multirun(cache, runs, "recipe=glob([bf1*,block/*],exclude=bf17)", "--config-dir", "mine") == 0
    (sweep,) = {row["sweep"] for row in listed(runs, capsys)} - {"grid"}
    assert [row["place"]["recipe"] for row in listed(runs, capsys, sweep)] == ["bf16", "block/none"]
    asked = ("+experiment=both", "hydra.searchpath=[mine]", "seed=0,1", "hydra.job.name=experiment")
    assert multirun(cache, runs, *asked) == 0
    for row in listed(runs, capsys, "experiment"):
        config = yaml.safe_load((runs / row["folder"] / "config.yaml").read_text())
        assert (config["recipe"]["keep"]["last"], config["optimizer"]["lr"]) == (1, 0.5)


def test_a_failed_trial_ends_a_sequential_sweep_with_status_1(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the first of two trials that a sweeper launches one by one fails, the command ends with status 1.

    The summary counts both trials. Hydra's own sweeper is used, with batches of one trial.
    """
    runs = tmp_path / "runs"
    batches = ("seed=0,1", "hydra.sweeper.max_batch_size=1", "hydra.job.name=one-by-one")
    assert multirun(cache, runs, *batches) == 0
    assert "2 trials: 2 done\n" in capfd.readouterr().out
    (folder,) = runs.glob("*-s0-*")
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "checkpoints").write_text("no folder")
    assert multirun(cache, runs, *batches) == 1
    assert "2 trials: 1 done, 1 failed\n" in capfd.readouterr().out
