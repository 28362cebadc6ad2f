"""Test `fewbits sweep --dry-run`: it lists trials, estimates time from measured speeds, and writes nothing."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.planning.cost import ADAM_MINI_BYTES, ADAMW_BYTES, Speeds, disk, parameters_of, work_of
from fewbits.sweeps.planning.outline import print_plan
from tests.experiments.trial_inputs import MOR
from tests.sweeps.conftest import Undisturbed
from tests.sweeps.sweep_inputs import planned, tiny_file


def dry_run(file: Path, runs: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert cli.main(["sweep", str(file), *overrides, "--runs", str(runs), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_what_is_there_is_told_apart_from_what_is_missing(
    undisturbed: Undisturbed, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(undisturbed.store.rglob("*"))
    assert dry_run(undisturbed.file, undisturbed.store, capsys).endswith("\n\n8 trials: 8 done\nnothing to run\n")
    shown = dry_run(undisturbed.file, undisturbed.store, capsys, "seeds=[0,2]")
    rows = shown.partition("\n\n")[0].splitlines()
    assert len(rows) == 8
    assert sum(row.endswith("  done") for row in rows) == 4
    assert sum(row.endswith("  planned") for row in rows) == 4
    assert re.search(r"^8 trials: 4 planned, 4 done$", shown, re.MULTILINE)
    assert re.search(r"^about \d+:\d\d, \d+ at a time, from speeds measured in this store$", shown, re.MULTILINE)
    assert sorted(undisturbed.store.rglob("*")) == before


def test_times_are_work_by_measured_speed_less_what_is_done(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(parallel: int) -> str:
        print_plan(plan, parallel)
        return capsys.readouterr().out

    file = tiny_file(tmp_path, cache, {"axes": {"training.steps": [8, 16]}, "resources": {"cpus": 1}})
    plan = planned(file, f"runtime.runs={tmp_path / 'runs'}")
    short, long = plan.trials.values()
    assert work_of(long.trial) == 2 * work_of(short.trial)
    tokens = long.trial.training.batch * long.trial.training.length
    Path(tmp_path / "runs").mkdir()
    Speeds(tmp_path / "runs").store_speed(short, tokens / 60)  # a speed of one step per minute
    assert Speeds(tmp_path / "runs").seconds(long) == pytest.approx(16 * 60)
    assert "about 24:00, 1 at a time" in printed(1)
    assert "about 16:00, 2 at a time" in printed(2)  # as long as the longer trial
    (RunFolder(long.folder.path, long.id).checkpoints / "step-00000008").mkdir(parents=True)
    assert "about 8:00, 2 at a time" in printed(2)
    assert disk([short]) == 2 * ADAMW_BYTES * parameters_of(short.trial.model)
    mini = replace(short, trial=replace(short.trial, optimizer=replace(short.trial.optimizer, kind="adam-mini")))
    assert disk([mini]) == 2 * ADAM_MINI_BYTES * parameters_of(short.trial.model)
    short.keep.update({1, 3})
    assert disk([short]) == 4 * ADAMW_BYTES * parameters_of(short.trial.model)


def test_a_trial_in_two_places_is_told_once(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny_file(
        tmp_path, cache, {"arms": {"a": {"overrides": MOR}, "b": {"overrides": [*MOR, "recipe.name=other"]}}}
    )
    shown = dry_run(file, tmp_path / "runs", capsys)
    assert shown.splitlines()[1].endswith("planned  (the same trial as above)")
    assert "\n1 trial: 1 planned\n" in shown


def test_results_that_a_changed_sweep_no_longer_uses_are_counted(
    undisturbed: Undisturbed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / undisturbed.file.name
    file.write_text(undisturbed.file.read_text().replace("training.batch=4", "training.batch=8"))
    shown = dry_run(file, undisturbed.store, capsys)
    assert re.search(r"^since the plan of .*: 8 trials changed$", shown, re.MULTILINE)
    assert re.search(r"^changed: .*training.batch.*; 8 results of the old plan not used$", shown, re.MULTILINE)


def test_arms_that_do_not_fit_on_a_gpu_are_named_with_the_ranks_that_would(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep_model = ["model.layers=16", "model.width=1024", "model.ffn=4096", "training.batch=2", "training.micro_batch=1"]
    arms = {"small": {}, "deep": {"overrides": deep_model}}
    file = tiny_file(tmp_path, cache, {"arms": arms, "resources": {"gpus": 1, "ranks": 1}})
    command = ["sweep", str(file), "--runs", str(tmp_path / "runs"), "--dry-run"]
    assert cli.main(command) == 0
    shown = capsys.readouterr()
    table = [line.split() for line in shown.out.partition("GB a rank")[2].splitlines()[1:]]
    assert [row[1:4] for row in table] == [["small", "nemotron-nano", "1"], ["deep", "nemotron-nano", "1"]]
    small, deep = (float(row[4]) for row in table)
    assert small < deep
    assert cli.main([*command, "--gpu-memory", str(deep)]) == 2  # it does not fit, since an arm may use 90 % of it
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert re.match(r"fewbits: \w+/deep: 1 rank needs .+; 2 ranks would fit", errors[0])
