"""Test `fewbits stop`, and `fewbits status` with --watch and of one run, with trials that really run."""

import json
from pathlib import Path
from typing import Any

import pytest

from fewbits import cli
from fewbits.common.terminal import Progress
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.sweeps.planning import store
from fewbits.sweeps.planning.store import State
from fewbits.sweeps.running.progress import watch
from tests.experiments.trial_inputs import overrides
from tests.messages import names
from tests.sweeps.conftest import Undisturbed
from tests.sweeps.running.test_progress import Terminal
from tests.sweeps.sweep_inputs import folders, planned, started, steps_done, tiny_file

LONG = ("training.steps=100000", "evaluation.every=100000")


@pytest.mark.usefixtures("forked_from_one")
def test_a_stopped_trial_ends_at_a_checkpoint_and_the_sweep_goes_on(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    trunk = {"overrides": ["recipe=bf16", *LONG], "axes": []}
    branch = {"overrides": ["recipe=nvfp4"], "axes": [], "parent": "long", "at": 99999}
    short = {"overrides": ["recipe=bf16", "training.steps=4"], "axes": []}
    file = tiny_file(tmp_path, cache, {"arms": {"long": trunk, "late": branch, "short": short}})
    long, *_ = found = folders(planned(file, f"runtime.runs={runs}"))
    command = started(tmp_path / "output", "sweep", file, "--runs", runs, "--backend", "local", "--parallel", "1")
    command.until(lambda: steps_done(long) > 2)

    assert cli.main(["status", str(long.path), "--lines", "1"]) == 0
    assert names(capsys.readouterr().out, "step")
    terminal, seen = Terminal(), list[str]()

    def look(_: float) -> None:
        seen.extend(terminal.screen)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(lambda: planned(file, f"runtime.runs={runs}"), display=Progress(terminal), pause=look)
    assert names("\n".join(seen), "3 trials", "1 running", "100000", "tokens/s", "left")

    hashed = long.path.name.rpartition("-")[2]
    assert cli.main(["stop", hashed, "--runs", str(runs)]) == 0
    assert names(capsys.readouterr().out, long.path.name, "stopped at step")
    assert store.reached(long) > 0
    assert command.end() == 1
    assert [store.state(folder) for folder in found] == ["planned", "planned", "done"]
    with pytest.raises(KeyboardInterrupt):
        watch(lambda: planned(file, f"runtime.runs={runs}"), display=Progress(terminal), pause=look)
    assert names(" ".join(seen), "1 half done")
    assert names(command.printed, "1 stopped", "fewbits stop", "run the same command again")
    assert cli.main(["stop", hashed, "--runs", str(runs)]) == 1
    assert names(capsys.readouterr().err, long.path.name, "not running")
    assert cli.main(["status", hashed, "--runs", str(runs), "--follow"]) == 0
    assert "stopped at a checkpoint" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.usefixtures("forked_from_one")
def test_a_trial_of_fewbits_train_is_stopped_too(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = overrides(cache, tmp_path / "runs", *LONG)
    command = started(tmp_path / "output", "train", *words)
    command.until(lambda: (tmp_path / "output").exists() and "step " in command.printed)
    (path,) = (tmp_path / "runs").glob("*-*")
    assert cli.main(["status", str(path)]) == 2
    assert cli.main(["stop", str(path)]) == 0
    assert command.end() == 130
    assert store.reached(RunFolder(path, "")) > 0
    assert names(capsys.readouterr().out, path.name, "stopped at step")


def test_watching_ends_when_all_trials_have_ended_and_names_failures(
    undisturbed: Undisturbed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(undisturbed.file, f"runtime.runs={tmp_path}", "seeds=[0]")
    trials: list[Any] = list(plan.trials.values())
    for trial in trials:
        trial.folder.path.mkdir(parents=True, exist_ok=True)
    waited: list[float] = []

    def end_one(seconds: float) -> None:
        waited.append(seconds)
        trial = trials.pop()
        if trials:
            result = {"id": trial.id, "status": "done", "step": trial.trial.training.steps}
            (trial.folder.path / "result.json").write_text(json.dumps(result))
        else:
            store.write_failure(trial.folder, store.Failure("it broke", False, 2, []))

    terminal = Terminal()
    statuses = watch(lambda: plan, 0.5, Progress(terminal), end_one)
    assert waited == [0.5] * len(plan.trials)
    assert sorted(status.state for status in statuses.values()).count(State.DONE) == len(waited) - 1
    assert any(names(line, "it broke", "failed") for line in terminal.screen)
    assert cli.main(["status", str(undisturbed.file), "--follow"]) == 2
    assert names(capsys.readouterr().err, "--follow", "one run")
    assert cli.main(["status", "--watch"]) == 2
    assert names(capsys.readouterr().err, "--watch")
