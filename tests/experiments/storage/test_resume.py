"""Test that a trial gives the same bytes if it is run twice, or interrupted at any point and resumed."""

import contextlib
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fewbits.experiments.config import load_trial
from fewbits.experiments.devices import World
from fewbits.experiments.session import Events, Progress, prepare
from fewbits.experiments.state import resume, save, set_up
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import RunFolder, opened
from fewbits.experiments.training import run
from tests.effort import DEEP
from tests.experiments.data.data_inputs import bin_folder
from tests.experiments.trial_inputs import (
    GAUSSWS_MOR,
    Interrupted,
    ended,
    ending,
    left,
    leftovers,
    metric,
    only_run,
    overrides,
    started,
    train,
    train_until,
)
from tests.messages import names, naming

ALONE = World(torch.device("cpu"))
TRIALS = {
    "sampler, mixture, adam-mini": (*GAUSSWS_MOR, "optimizer=adam-mini"),
    "mamba-2, muon": ("recipe=nvfp4", "optimizer=muon", "model=hybrid-nano", "model.layers=3", "model.pattern=M-*"),
    "experts": ("recipe=nvfp4", "model=moe-nano", "model.layers=5", "model.shared_ffn=256"),
    # The first updates overflow, so that the loss scale is halved, and it is doubled again before the end.
    "fp16, scaled dynamically, weights rounded stochastically": (
        *("precision=fp16-weights", "precision.rounding=stochastic", "precision.states=bf16"),
        *("precision.loss_scale=8388608.0", "precision.growth_interval=2", "precision.every=2"),
    ),
    "unobserved, stochastic forward, late switch": (
        *("recipe=nvfp4", "recipe.stochastic=[fprop.x,fprop.w,dgrad.dy,wgrad.dy]", "observer.enabled=false"),
        *("recipe.switch.at=0.5", "recipe.switch.passes=forward", "recipe.switch.to=e4m3:1x128:amax:stochastic"),
    ),
}


@pytest.fixture(scope="module")
def undisturbed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Train a trial with default settings without interruption."""
    return train(cache, tmp_path_factory.mktemp("undisturbed"))[0]


@pytest.mark.parametrize("trial", TRIALS)
def test_a_trial_gives_the_same_bytes_when_it_is_interrupted(trial: str, cache: Path, tmp_path: Path) -> None:
    asked = ("training.steps=8", *TRIALS[trial])
    undisturbed, result = train(cache, tmp_path / "undisturbed", *asked)
    assert result["status"] == "done"
    if trial.startswith("fp16"):
        _check_overflow_and_recovery(undisturbed)
    for step in (2, 5):
        train_until(step, cache, tmp_path / "broken", *asked)
    resumed, _ = train(cache, tmp_path / "broken", *asked)
    assert left(resumed.path) == left(undisturbed.path)


def _check_overflow_and_recovery(folder: RunFolder) -> None:
    skipped, scales = metric(folder, "skipped"), metric(folder, "loss_scale")
    assert skipped[0] == 1
    lowest = scales.index(min(scales))
    assert scales[0] > scales[lowest] < max(scales[lowest:]), scales


def test_final_evaluations_are_the_same_where_only_they_are_left(cache: Path, tmp_path: Path) -> None:
    trial = (*TRIALS["unobserved, stochastic forward, late switch"], "training.steps=4")
    folder, _ = train(cache, tmp_path, *trial, "data=python", "data.size=200000")
    before = left(folder.path)
    (folder.path / "result.json").unlink()
    train(cache, tmp_path, *trial, "data=python", "data.size=200000")
    assert left(folder.path) == before


def test_what_draws_from_torchs_generator_goes_on_where_it_was(cache: Path, tmp_path: Path) -> None:
    """Check torch's global generator, which fewbits does not use, but code that a user adds may."""

    def drawn(runs: Path, until: int = 8) -> list[float]:
        numbers: list[float] = []

        def say(progress: Progress) -> None:
            numbers.append(torch.rand(()).item())
            if progress.step == until < 8:
                raise Interrupted

        with contextlib.suppress(Interrupted):
            train(cache, runs, "training.steps=8", say=say)
        return numbers

    undisturbed = drawn(tmp_path / "undisturbed")
    drawn(tmp_path / "broken", until=5)
    torch.rand(100)
    assert drawn(tmp_path / "broken") == undisturbed[3:]


# ------------------------------------------------------------------------------------------------ killed processes

KILLED = (
    *("recipe=nvfp4", "recipe.sampler.kind=gaussws", "recipe.sampler.penalty=0.0001"),
    *("precision=fp16", "precision.loss_scale=4194304.0", "precision.growth_interval=2", "precision.every=2"),
    *("training.checkpoint_every=2", "evaluation.every=2", "evaluation.windows=8"),  # most of the run time
)
KILLS = 10 if DEEP else 2


def test_a_trial_killed_at_random_moments_gives_the_same_bytes(cache: Path, tmp_path: Path) -> None:
    """Kill a trial several times, also while it writes a checkpoint; if it ends too early, start a new one."""
    runs, output = tmp_path / "killed", tmp_path / "output"
    began = time.monotonic()
    undisturbed, _ = train(cache, tmp_path / "undisturbed", *KILLED)
    whole = time.monotonic() - began
    _check_overflow_and_recovery(undisturbed)
    moments, kills, ends = random.Random(), 0, 0
    while kills < KILLS or not ends:
        with ending(started(["train", *overrides(cache, runs, *KILLED)], output)) as process:
            if kills in (1, 4, 7):
                while process.is_alive() and not list(runs.glob("*/checkpoints/.step-*.partial")):
                    time.sleep(0.0005)
            elif kills < KILLS:
                process.join(whole * moments.uniform(0.2, 0.9))
            else:
                process.join()
            process.kill()
            process.join()
        if process.exitcode == -signal.SIGKILL:
            kills += 1
            continue
        assert process.exitcode == 0, output.read_text()
        assert left(only_run(runs)) == left(undisturbed.path)
        assert not leftovers(runs)
        shutil.rmtree(runs)
        ends += 1


def test_ctrl_c_ends_a_trial_at_a_checkpoint_and_with_130(cache: Path, tmp_path: Path) -> None:
    runs, output = tmp_path / "runs", tmp_path / "output"
    asked = (*KILLED, "training.checkpoint_every=100")
    with ending(started(["train", *overrides(cache, runs, *asked)], output)) as process:
        while process.is_alive() and (not output.exists() or "step 3/12" not in output.read_text()):
            time.sleep(0.001)
        assert process.pid
        os.kill(process.pid, signal.SIGINT)
        assert ended(process) == 130
    assert names(output.read_text().splitlines()[-1], "stopped", "resumes")
    assert not leftovers(runs)
    (step,) = checkpoints.steps(only_run(runs) / "checkpoints")
    assert f"step {step}/12" in output.read_text()
    assert f"step {step + 1}/12" not in output.read_text()
    folder, _ = train(cache, runs, *asked)
    undisturbed, _ = train(cache, tmp_path / "undisturbed", *asked)
    assert left(folder.path) == left(undisturbed.path)


def test_a_full_disk_is_said_in_one_line_and_gone_on_from(cache: Path, tmp_path: Path) -> None:
    runs, output, asked = tmp_path / "runs", tmp_path / "output", (*KILLED, "training.steps=4")
    with ending(started(["train", *overrides(cache, runs, *asked)], output, file_size=1 << 20)) as process:
        assert ended(process) == 1
    (message,) = (line for line in output.read_text().splitlines() if line.startswith("fewbits:"))
    assert "checkpoint not written" in message
    assert "bytes, " in message
    folder = only_run(runs)
    assert not leftovers(folder)
    assert not list((folder / "checkpoints").glob("*"))
    train(cache, runs, *asked)
    undisturbed, _ = train(cache, tmp_path / "undisturbed", *asked)
    assert left(folder) == left(undisturbed.path)


# ------------------------------------------------------------------------------------------------ damage and races


def test_a_kept_checkpoint_serves_if_all_others_are_damaged(
    undisturbed: RunFolder, cache: Path, tmp_path: Path
) -> None:
    asked = ("runtime.keep_every=4",)
    train_until(8, cache, tmp_path / "runs", *asked)
    for state in (only_run(tmp_path / "runs") / "checkpoints").glob("*/state.json"):
        state.write_text("{}")
    steps: list[int] = []
    with pytest.warns(UserWarning, match="damaged checkpoint"):
        folder, _ = train(cache, tmp_path / "runs", *asked, say=lambda progress: steps.append(progress.step))
    assert steps[0] == 5
    assert left(folder.path) == left(undisturbed.path)


def test_a_checkpoint_of_other_data_is_refused(cache: Path, tmp_path: Path) -> None:
    train_until(4, cache, tmp_path)
    session = prepare(*load_trial(overrides(cache, tmp_path, "data.seed=1")), ALONE, Events())
    state = set_up(session.trial, torch.device("cpu"))
    with pytest.raises(ValueError, match="these are not the data of the checkpoint"):
        resume(state, replace(session, folder=opened(only_run(tmp_path))))


def test_data_that_are_written_to_under_a_trial_end_it_before_its_next_checkpoint(cache: Path, tmp_path: Path) -> None:
    """A file that is replaced ends no trial, because the trial still reads the old one, which it has open."""
    tokens, runs = bin_folder(tmp_path / "tokens", range(4000), range(2000)), tmp_path / "runs"
    asked = ("data=bin", "data.size=null", f"data.path={tokens}")

    def replaced(progress: Progress) -> None:
        if progress.step == 2:
            (tokens / "new").write_bytes(bytes(8000))
            (tokens / "new").replace(tokens / "val.bin")

    def overwritten(progress: Progress) -> None:
        if progress.step == 2:
            with (tokens / "train.bin").open("r+b") as file:
                file.write(bytes(8))

    undisturbed, _ = train(cache, tmp_path / "undisturbed", *asked)
    again, _ = train(cache, runs, *asked, say=replaced)
    assert left(again.path) == left(undisturbed.path)
    shutil.rmtree(runs)
    with pytest.raises(ValueError, match=naming("train.bin")):
        train(cache, runs, *asked, say=overwritten)
    assert not list(runs.rglob("step-*"))
    assert not list(runs.rglob("result.json"))


def test_two_processes_on_one_trial_leave_one_result(undisturbed: RunFolder, cache: Path, tmp_path: Path) -> None:
    argv, output = ["train", *overrides(cache, tmp_path / "runs")], tmp_path / "output"
    with ending(started(argv, output)) as one, ending(started(argv, output)) as two:
        statuses = sorted((ended(one), ended(two)))
    assert statuses in ([0, 2], [0, 0])  # both succeed if the second process starts after the first has finished
    assert ("is working on this trial" in output.read_text()) == (statuses == [0, 2])
    assert left(only_run(tmp_path / "runs")) == left(undisturbed.path)


def test_what_is_not_finite_in_a_row_comes_back_from_a_checkpoint(cache: Path, tmp_path: Path) -> None:
    trial, runtime = load_trial(overrides(cache, tmp_path, "training.steps=3"))
    folder, _ = run(trial, runtime)
    session = prepare(trial, runtime, ALONE, Events())
    state = set_up(trial, torch.device("cpu"))
    resume(state, session)
    state.numerics[-1] |= {"gradient_error": float("nan"), "gradient_norm": float("inf")}
    recorded = repr((state.metrics, state.numerics))
    state.step = 4
    save(state, session.corpus, folder.checkpoints, ALONE, keep=1)
    state.write_tables(folder.path)
    again = set_up(trial, torch.device("cpu"))
    resume(again, session)
    assert repr((again.metrics, again.numerics)) == recorded
